"""The archive: finished rollouts as Parquet files, from which they can be imported again."""
