"""Read rows from local files, saved datasets and the Hugging Face Hub."""
