// Where the server is: the page works under any path that a proxy gives it.
export const BASE = new URL("..", import.meta.url);
