"""Is this node exposed? Facts, findings by rules, and what to do: on the machine itself or from files
sent by others.
"""
