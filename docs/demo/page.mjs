// page.mjs: the demo's page: loads the packed passages, scores the chosen question, and shows what met what.
import { load, topk } from "./numkong.mjs";

const SHOWN = 8; // passages
const SAID = 3; // matches named under a passage

// A token that is near something in every passage ("which", "the") decides nothing. What counts is how much of the way
// from its average over the passages to 1, the most there is, its similarity has made; these are the marks' thresholds.
const LEVELS = [0.15, 0.35, 0.6, 0.85];
const WORD = /[\p{L}\p{N}_]+(?:['\u2019][\p{L}\p{N}_]+)*/gu;

const at = (id) => document.getElementById(id);
const element = (name, properties = {}, ...children) => {
  const made = document.createElement(name);
  const { dataset = {}, attributes = {}, ...rest } = properties;
  Object.assign(made, rest);
  Object.assign(made.dataset, dataset);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
};

/** Fetch a built file, telling how much of it has come. */
async function fetched(name, came = () => {}) {
  const response = await fetch(`built/${name}`);
  if (!response.ok) throw new Error(`built/${name} answered ${response.status}; run python3 docs/demo/build.py`);
  const total = Number(response.headers.get("Content-Length")) || 0;
  const parts = [];
  let bytes = 0;
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    bytes += value.length;
    came(total ? bytes / total : 0);
  }
  return new Blob(parts).arrayBuffer();
}

/** Everything that the page needs, loaded once. */
async function loadDemo() {
  const row = new URLSearchParams(location.search).get("row") ?? undefined;
  const [nk, texts, questions, passages] = await Promise.all([
    load({ row }),
    fetched("texts.json").then((bytes) => JSON.parse(new TextDecoder().decode(bytes))),
    fetched("questions.nkpack"),
    fetched("passages.nkpack", (share) => (at("progress").value = share)),
  ]);
  return { nk, texts, questions: nk.open(questions), passages: nk.open(passages) };
}

/** Scores of one question: every passage's mean similarity, and for each of its tokens the best token and how telling. */
function answer({ nk, questions, passages }, question) {
  const started = performance.now();
  const options = { sets: [question, question + 1], reduction: "mean", argmax: true, tokenScores: true };
  const { scores, argmax, tokenScores, documents, longest } = nk.maxsim(questions, passages, options);
  const milliseconds = performance.now() - started;
  const averages = Array.from({ length: longest }, (_, i) => {
    let sum = 0;
    for (let passage = 0; passage !== documents; ++passage) sum += tokenScores[passage * longest + i];
    return sum / documents;
  });
  const matches = (passage) =>
    averages.map((average, i) => {
      const similarity = tokenScores[passage * longest + i];
      const telling = (similarity - average) / (1 - average);
      return { query: i, token: argmax[passage * longest + i], similarity, telling, level: levelOf(telling) };
    });
  const ranking = topk(scores, SHOWN).map((passage) => ({
    passage,
    score: scores[passage],
    matches: matches(passage),
  }));
  return { ranking, milliseconds };
}

const levelOf = (telling) => LEVELS.filter((threshold) => telling >= threshold).length;
const decimal = (number) => number.toFixed(2);
const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;

/** What a token of a question is called: its characters, or the name of a special token. */
function tokenName({ text, spans }, i) {
  const [start, end] = spans[i];
  if (end > start) return text.slice(start, end);
  return i === 0 ? "[CLS]" : "[SEP]";
}

/** The word that a token is a piece of, as [begin, end, true]; punctuation stands for itself and is no word. */
function wordAt(text, [start, end]) {
  for (const { index, 0: word } of text.matchAll(WORD))
    if (index <= start && end <= index + word.length) return [index, index + word.length, true];
  return [start, end, false];
}

/** A passage's text with its words marked: by all matches, or by the chosen token's alone, be it punctuation. */
function markedText({ text, spans }, matches, chosen) {
  const marks = new Map();
  for (const { query, token, level } of matches) {
    const [start, end, isWord] = wordAt(text, spans[token]);
    if (chosen === null ? level === 0 || !isWord : query !== chosen) continue;
    if ((marks.get(start)?.level ?? -1) < level) marks.set(start, { start, end, level });
  }
  const pieces = [];
  let done = 0;
  for (const { start, end, level } of [...marks.values()].sort((a, b) => a.start - b.start)) {
    const dataset = chosen === null ? { level } : { level, chosen: "" };
    pieces.push(text.slice(done, start), element("mark", { className: "heat", dataset }, text.slice(start, end)));
    done = end;
  }
  return [...pieces, text.slice(done)];
}

/** The matches of a passage in words, the most telling first: "silver met silver (0.83)". */
function saidMatches(question, passage, matches, chosen) {
  const told = matches.filter((match) => (chosen === null ? match.level >= 2 : match.query === chosen));
  told.sort((a, b) => b.telling - a.telling);
  return told.slice(0, SAID).map(({ query, token, similarity }) => {
    const met = passage.text.slice(...wordAt(passage.text, passage.spans[token]));
    return `${tokenName(question, query)} met ${met} (${decimal(similarity)})`;
  });
}

function passageItem(question, hit, passage, chosen) {
  const { score, matches } = hit;
  const known = question.answers.includes(passage.id);
  const said = saidMatches(question, passage, matches, chosen);
  const rows = matches.map(({ query, token, similarity, level }) =>
    element(
      "tr",
      { dataset: { query, token } },
      element("th", { scope: "row" }, tokenName(question, query)),
      element("td", {}, passage.text.slice(...wordAt(passage.text, passage.spans[token]))),
      element(
        "td",
        { className: "number" },
        element("data", { value: String(similarity), className: "heat", dataset: { level } }, decimal(similarity)),
      ),
    ),
  );
  const head = ["Token", "Best match", "Similarity"].map((title) => element("th", { scope: "col" }, title));
  return element(
    "li",
    { dataset: { passage: hit.passage } },
    element(
      "article",
      { attributes: { "aria-label": passage.id } },
      element(
        "h3",
        {},
        passage.id.replace("/", ": "),
        known ? element("span", { className: "known" }, "a known answer") : "",
      ),
      element("p", { className: "score" }, "score ", element("data", { value: String(score) }, score.toFixed(3))),
      element("p", { className: "text" }, ...markedText(passage, matches, chosen)),
      element("p", { className: "said" }, said.length ? said.join("; ") : "no token met anything telling"),
      element(
        "details",
        {},
        element("summary", {}, "Which word each token met"),
        element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
      ),
    ),
  );
}

function mapRows(question, ranking, texts, chosen) {
  const tokens = question.spans.map((_, i) =>
    element("th", { scope: "col", className: i === chosen ? "chosen" : "" }, tokenName(question, i)),
  );
  const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Passage"), ...tokens));
  const rows = ranking.map(({ passage, matches }, rank) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, `${rank + 1}. ${texts.passages[passage].id.replace("/", ": ")}`),
      ...matches.map(({ query, similarity, level }) =>
        element(
          "td",
          { className: query === chosen ? "heat chosen" : "heat", dataset: { level } },
          decimal(similarity),
        ),
      ),
    ),
  );
  return [head, element("tbody", {}, ...rows)];
}

/** Wire the page to what was loaded. */
function start(demo) {
  const { nk, texts, passages } = demo;
  let question = null;
  let found = null;
  let chosen = null;

  const draw = () => {
    const open = new Set(
      [...document.querySelectorAll("#passages details[open]")].map((d) => d.closest("li").dataset.passage),
    );
    at("passages").replaceChildren(
      ...found.ranking.map((hit) => passageItem(question, hit, texts.passages[hit.passage], chosen)),
    );
    for (const item of at("passages").children) item.querySelector("details").open = open.has(item.dataset.passage);
    at("map").replaceChildren(...mapRows(question, found.ranking, texts, chosen));
    for (const button of at("tokens").children) button.ariaPressed = String(button.value === String(chosen ?? ""));
  };

  const choose = (token) => {
    chosen = token;
    at("tokens-said").textContent =
      token === null ? "All tokens are marked." : `Marked is what ${tokenName(question, token)} met in each passage.`;
    draw();
  };

  const ask = (index) => {
    question = texts.questions[index];
    found = answer(demo, index);
    chosen = null;
    const button = (value, name) =>
      element(
        "button",
        {
          type: "button",
          value,
          onclick: () => choose(value === "" ? null : Number(value)),
        },
        name,
      );
    at("tokens").replaceChildren(
      button("", "All tokens"),
      ...question.spans.map((_, i) => button(String(i), tokenName(question, i))),
    );
    draw();
    const best = texts.passages[found.ranking[0].passage].id.replace("/", ": ");
    const why = nk.reason ? ` (${nk.reason})` : "";
    at("status").replaceChildren(
      `Best passage: ${best}. ${count(passages.count, "passage")}, ${count(passages.tokens, "token")}, scored in `,
      element("data", { id: "time", value: String(found.milliseconds) }, `${found.milliseconds.toFixed(1)} ms`),
      " with row ",
      element("code", { id: "row" }, nk.row),
      `${why}.`,
    );
    history.replaceState(null, "", `#${index + 1}`);
  };

  at("question").append(...texts.questions.map(({ text }, index) => element("option", { value: String(index) }, text)));
  at("question").disabled = false;
  at("question").addEventListener("change", () => ask(at("question").selectedIndex));
  at("ask").addEventListener("submit", (event) => event.preventDefault());
  at("progress").hidden = true;
  at("answer").hidden = false;
  const asked = Number.parseInt(location.hash.slice(1), 10) - 1;
  at("question").selectedIndex = asked in texts.questions ? asked : 0;
  ask(at("question").selectedIndex);
}

loadDemo()
  .then(start)
  .catch((error) => {
    at("progress").hidden = true;
    at("status").textContent = "";
    at("failure").hidden = false;
    at("failure").textContent = error.message;
  });
