"""Token ids in, token ids out: the engine of one replica, without Ray and without HTTP.

Each folder is one layer. A folder imports only from the folders to its right:

    workers > draft_buffer > draft > model > core > sampling > messages, config, errors

    workers       what lives in a process: target shard, leader of the shards, draft worker
    draft_buffer  the memory that target and draft share
    draft         who proposes tokens
    model         tensors: the decoder and what it is made of
    core          the step loop and the values its phases exchange
    sampling      logits -> distribution -> token
    checkpoint    files of a model (below model)
    ipc           the other ways between processes (below draft_buffer)
    metrics       metric definitions and counters (above core)
"""
