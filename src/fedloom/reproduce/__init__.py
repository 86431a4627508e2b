"""Published tables and figures, each from one file: what the paper printed beside what comes out here."""
