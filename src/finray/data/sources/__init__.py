"""Sources of rows: files, directories, URLs and Hugging Face datasets, split into byte ranges."""
