"""`python -m bertfast`."""

from bertfast.cli import main

if __name__ == "__main__":
    main()
