"""The commands of `moespac`, a file each; cli.py registers them."""
