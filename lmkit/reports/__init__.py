"""The write-ups of `lmkit report`, made from stored rows alone."""
