"""Weight sync from the trainer to generation servers: files, broadcast, NCCL and IPC."""
