"""OpenAI's Files and Batch API: files with many requests, which run in the background (`--batch-dir`).

multipart   the parts of uploads
records     files and batches, as they are stored and as clients see them
folder      the folder with the database and the contents of files: blocking, used in one thread
tables      the tables of the database
results     the lines of the output and error file of a batch: made, and read and repaired at a start
store       the folder for the event loop: every call runs in the store's thread
input_lines the lines of an input file, checked in pieces
line_calls  sends the request of a line into the application, as the key that created the batch
turns       which owner's next line runs, and when: the requests of clients come first
usage       the files and bytes of each owner, with their limits
batch_run   runs one batch from its present state to its end
runner      runs all batches of a server
file_routes, batch_routes
"""
