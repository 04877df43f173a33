"""llama-index: chat, stream, completion."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key="none",
    is_chat_model=True,
    context_window=4096,
    max_tokens=60,
)
text = llm.chat([ChatMessage(role="user", content="Which city is the capital of France?")]).message.content
assert text
assert text == (os.environ["ANSWER"] or text)
assert [chunk.delta for chunk in llm.stream_chat([ChatMessage(role="user", content="Count.")])]
assert llm.complete("Once upon").text
