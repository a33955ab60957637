"""The processes that share a database: who is a member, who may write about a run, what all must forget, what rounds cost."""
