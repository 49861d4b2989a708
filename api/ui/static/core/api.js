/** The service's REST API, with the rights of whoever is signed in. */

const BASE = document.documentElement.dataset.base ?? "";
/** The version of the API that this speaks. Pages of other sites cannot send such a header, and so change nothing. */
const VERSION = { "Manta-Rest": "1" };

/** An answer that says what is wrong (RFC 9457). */
export class Problem extends Error {
  constructor(document, status) {
    super(document.detail ?? `the service answers ${status}`);
    this.status = status;
    this.code = document.code ?? "";
    this.errors = document.errors ?? [];
  }
}

/** The service does not answer. */
export class Unreachable extends Error {
  constructor() {
    super("Cannot reach the service, retrying");
  }
}

/** Address of a path of the service, with a query: null, undefined and "" leave a parameter out, arrays repeat it. */
export function address(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") parameters.append(name, each);
    }
  }
  const text = parameters.toString();
  return `${BASE}${path}${text ? `?${text}` : ""}`;
}

/** What is at a path. Throws Problem and Unreachable; AbortError where `signal` says so. */
export function get(path, query = {}, { signal } = {}) {
  return request("GET", address(path, query), undefined, signal);
}

/** Ask for a change; `body` is sent as JSON. Throws like `get`. */
export function send(method, path, body, query = {}, { headers = {} } = {}) {
  return request(method, address(path, query), body, undefined, headers);
}

async function request(method, url, body, signal, more = {}) {
  const headers = { ...VERSION, ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...more };
  let response, text;
  try {
    response = await fetch(url, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    text = await response.text(); // which may break off, too
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable();
  }
  const answer = documentIn(text);
  if (response.ok && answer !== undefined) return answer;
  throw new Problem(answer ?? { detail: `a server that is not Manta answered with ${response.status}` }, response.status);
}

/** null where there is none, undefined where it is not ours. */
function documentIn(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return undefined;
  }
}

/** All pages of a list, up to `most` items. */
export async function all(path, query = {}, most = 10_000, options = {}) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(path, { limit: 1000, ...query, cursor }, options);
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return items;
}

/** What `call` answers; `otherwise` where this viewer, this release or this job does not have it. */
export async function optional(call, otherwise = null) {
  try {
    return await call;
  } catch (error) {
    if (error instanceof Problem && [403, 404, 405, 409, 422, 501].includes(error.status)) return otherwise;
    throw error;
  }
}
