"""Workers run the server's engines: in processes that share memory with it, or in threads of its own."""
