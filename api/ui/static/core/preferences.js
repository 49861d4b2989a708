/** What this browser remembers of its viewer; nothing where it keeps nothing. */

/** The value kept under a name; null: none. */
export function remembered(name) {
  try {
    return localStorage.getItem(`manta.${name}`);
  } catch {
    return null;
  }
}

/** Keep a value under a name. */
export function remember(name, value) {
  try {
    localStorage.setItem(`manta.${name}`, value);
  } catch {
    // then it holds for this page alone
  }
}
