/** Where documents differ. Pure functions. */

/** `[[path, text of each document], ...]` of all leaves that are not alike in all of `documents`. */
export function differences(documents) {
  const leaves = documents.map((document) => new Map(leavesOf(document, "")));
  const paths = [...new Set(leaves.flatMap((each) => [...each.keys()]))];
  return paths
    .map((path) => [path, ...leaves.map((each) => each.get(path) ?? "–")])
    .filter(([, first, ...others]) => others.some((value) => value !== first));
}

function* leavesOf(value, path) {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0) {
    for (const [key, each] of Object.entries(value)) yield* leavesOf(each, path ? `${path}.${key}` : key);
  } else {
    yield [path, typeof value === "string" ? value : JSON.stringify(value)];
  }
}
