// Talking to the server: JSON answers, event streams, and errors as the server words them.

/** What the server said no with, or that it said nothing. `status` is 0 where there was no answer. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let apiKey = null;

/** Send this API key from now on. It is kept here only, and gone on reload. */
export function useApiKey(key) {
  apiKey = key;
}

/** fetch, with failures as ServerError. Addresses are relative to the page, so a path prefix is kept. */
export async function request(path, options = {}) {
  let response;
  const headers = apiKey === null ? options.headers : { authorization: `Bearer ${apiKey}`, ...options.headers };
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Not the API's own error; the status has to do.
  }
  throw new ServerError(message, response.status);
}

export async function getJson(path, options = {}) {
  return (await request(path, options)).json();
}

/** Objects of an event stream, in order, until [DONE]. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The connection broke before the answer ended.");
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ServerError(parsed.error.message);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Stream a chat answer with the origin of its tokens; yields {at, trace, usage}, `at` in milliseconds. */
export async function* streamChat(fields, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      ...fields,
      stream: true,
      stream_options: { include_usage: true },
      speculative: { ...fields.speculative, trace: true },
    }),
    signal,
  });
  try {
    for await (const chunk of readEvents(response.body)) {
      yield { at: performance.now(), trace: chunk.paceline, usage: chunk.usage };
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("The connection broke before the answer ended.");
    throw error;
  }
}
