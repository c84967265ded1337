"""A job: its ranks start, train one policy and end. What is put together here knows both algorithms."""
