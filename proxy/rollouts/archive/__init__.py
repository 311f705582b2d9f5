"""The archive: finished rollouts as Parquet files, from which they can be imported again.

columns     the columns of the files, and their schema version
rows        one row for each step: from a record of the store, and back
tables      rows as Parquet, in row groups of bounded size, and back
dataset     the files under a path or URL: written once, listed, read
card        the README.md of a dataset
writing     a rollout of the store as rows of a file
archiver    claims rollouts, writes them to files, and deletes them
background  the archiver of a running process
importer    brings archived rollouts back into a store
"""
