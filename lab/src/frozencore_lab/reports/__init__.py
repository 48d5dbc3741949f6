"""Make reports from records alone: tables, figures, one self-contained page."""
