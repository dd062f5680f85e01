"""Upload of run folders to object storage, and download from it."""
