"""Where rows come from: files, directories, URLs and Hugging Face data sets, cut into byte ranges."""
