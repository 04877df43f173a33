// Requests to the server: JSON responses, event streams, and the server's error messages.

/** An error response, or none: `status` is 0 if there was no response. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let apiKey = null;

/** Send this API key from now on. It is kept in memory only, until the page is reloaded. */
export function useApiKey(key) {
  apiKey = key;
}

/** fetch that throws ServerError. URLs are relative to the page, so they work below a path prefix. */
export async function request(path, options = {}) {
  let response;
  const headers = apiKey === null ? options.headers : { authorization: `Bearer ${apiKey}`, ...options.headers };
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServerError("The server does not respond.");
  }
  if (response.ok) return response;
  let message = `The server responded with status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // The body is not an error of this API, so the message is the status.
  }
  throw new ServerError(message, response.status);
}

export async function getJson(path, options = {}) {
  return (await request(path, options)).json();
}

/** The objects of an event stream, in order, up to [DONE]. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The connection closed before the response was complete.");
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

/** Stream a chat response with the origin of its tokens. Yields {at, trace, usage}; `at` is in milliseconds. */
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
    if (error instanceof TypeError) throw new ServerError("The connection closed before the response was complete.");
    throw error;
  }
}
