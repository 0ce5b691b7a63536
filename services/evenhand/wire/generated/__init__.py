"""Generated from schemas/evenhand/v1; see schemas/generate.py."""
