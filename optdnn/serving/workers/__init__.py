"""What runs engines for the server: processes that share memory with it, or threads of its own."""
