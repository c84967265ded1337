"""`pala compare`: variants x games x rank counts x seeds, run and reported from one preset."""
