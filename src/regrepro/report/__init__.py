"""A run as a report for people who were not there: HTML, Markdown, text, TAP, and a C program."""
