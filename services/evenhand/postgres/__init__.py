"""The ports over Postgres, its migrations and the seed file."""
