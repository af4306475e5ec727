"""Commands of the command line, one module for each; cli.py registers them."""
