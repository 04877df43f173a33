"""Token ids in, token ids out: the engine of one replica, without Ray and without HTTP.

Each folder is one layer. Layers, highest first; a folder imports only from layers below its own:

    workers       the target shard, rank 0's leader and the draft worker: what runs in each process
    draft_buffer  the memory that target and draft share
    draft         drafters: prompt lookup, grammar-forced tokens, draft models; the draft's own side as well
    model         tensors: the decoder, its layers, its KV cache and its devices
    metrics       metric definitions and counters
    ipc           the other ways between processes: shared memory, the forward ring, sockets
    core          the step loop, its scheduler and block pool, and the values that its phases exchange
    sampling      logits -> distribution -> token
    checkpoint    files of a model: where they come from and what they mean

Below all of them: `messages` (requests in, deltas out), `config` (settings) and `errors` (the exception tree).
Read `core/engine.py` first: `Engine.step` is the whole loop.
"""
