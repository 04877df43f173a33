"""Online adaptation of a draft: what it collects, when its trainer runs, which weights serve."""
