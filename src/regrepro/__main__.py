"""`python -m regrepro`."""

from regrepro.cli import main

if __name__ == "__main__":
    main()
