"""Pictures of rows: content, placeholders, storage, and pixels of a batch."""
