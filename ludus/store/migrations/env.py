"""Alembic's entry: runs the migrations on the connection, and in the transaction, that
`ludus.store.migrate` hands over."""

from alembic import context

from ludus.store.migrate import VERSION_TABLE
from ludus.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
