// browse.mjs: the demo's page in headless Chromium, by keyboard and by mouse; prints what it showed as JSON.
//
//   node browse.mjs URL CHROMIUM FOLDER     (playwright-core and axe-core in the working directory's node_modules)
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const [url, executablePath, folder] = process.argv.slice(2);
const require = createRequire(join(process.cwd(), "here.js"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const seen = { version: browser.version(), elsewhere: [], messages: [], audits: {} };

/** A page that keeps what it asked for elsewhere and what it complained about. */
async function open(options = {}, query = "") {
  const context = await browser.newContext({
    viewport: { width: 1200, height: 900 },
    reducedMotion: "reduce",
    ...options,
  });
  const page = await context.newPage();
  page.on("request", (request) => request.url().startsWith(url) || seen.elsewhere.push(request.url()));
  page.on("console", (message) => seen.messages.push(message.text()));
  page.on("pageerror", (error) => seen.messages.push(String(error)));
  await page.goto(url + query);
  await page.waitForSelector("#answer:not([hidden])");
  return page;
}

/** What the page shows for the question in it. */
const shown = (page) =>
  page.evaluate(() => ({
    question: document.querySelector("#question").selectedOptions[0].textContent,
    row: document.querySelector("#row").textContent,
    status: document.querySelector("#status").textContent,
    milliseconds: Number(document.querySelector("#time").value),
    tokens: [...document.querySelectorAll("#tokens button")].map((button) => button.textContent),
    passages: [...document.querySelectorAll("#passages > li")].map((item) => ({
      index: Number(item.dataset.passage),
      score: item.querySelector(".score data").value,
      argmax: [...item.querySelectorAll("tbody tr")].map((row) => Number(row.dataset.token)),
      similarity: [...item.querySelectorAll("tbody data")].map((cell) => cell.value),
      marked: [...item.querySelectorAll("mark")].map((mark) => mark.textContent),
      said: item.querySelector(".said").textContent,
    })),
    announced: document.querySelector("#tokens-said").textContent,
    map: [...document.querySelectorAll("#map tbody tr")].map((row) => row.cells.length),
  }));

const audit = async (page) => {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(", ")}`);
};

const page = await open();
seen.questions = [await shown(page)];

// keyboard: to the question, the next ones with the arrow key, then on to a token's button
while ((await page.evaluate(() => document.activeElement.id)) !== "question") await page.keyboard.press("Tab");
const count = await page.locator("#question option").count();
for (let index = 1; index !== count; ++index) {
  await page.keyboard.press("ArrowDown");
  seen.questions.push(await shown(page));
}
await page.keyboard.press("Home");
for (let index = 0; index !== 6; ++index) await page.keyboard.press("ArrowDown");
while ((await page.evaluate(() => document.activeElement.textContent)) !== "silver") await page.keyboard.press("Tab");
await page.keyboard.press("Enter");
seen.byKeyboard = await shown(page);
await page.keyboard.press("Shift+Tab");

// mouse: all tokens again, and the first passage's table
await page.getByRole("button", { name: "All tokens" }).click();
await page.getByText("Which word each token met").first().click();
seen.byMouse = await shown(page);
seen.tableIsOpen = await page.locator("#passages details[open] table").first().isVisible();
seen.audits.light = await audit(page);
await page.screenshot({ path: join(folder, "page.png"), fullPage: true });
await page.getByRole("button", { name: "silver", exact: true }).click();
await page.screenshot({ path: join(folder, "page-token.png") });
seen.names = await page.locator("body").ariaSnapshot();

const narrow = await open({ viewport: { width: 360, height: 740 }, colorScheme: "dark" }, "#7");
seen.audits.dark = await audit(narrow);
seen.overflow = await narrow.evaluate(
  () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
);
await narrow.screenshot({ path: join(folder, "page-narrow-dark.png") });

const serial = await open({}, "?row=serial#7");
seen.serial = await shown(serial);

const broken = await browser.newPage();
await broken.route("**/passages.nkpack", (route) => route.fulfill({ status: 404, body: "" }));
await broken.goto(url);
seen.failure = await broken.locator("#failure").textContent({ timeout: 10_000 });
await broken.unroute("**/passages.nkpack");
await broken.route("**/passages.nkpack", (route) => route.fulfill({ status: 200, body: Buffer.alloc(5000) }));
await broken.reload();
await broken.waitForSelector("#failure:not([hidden])");
seen.damaged = await broken.locator("#failure").textContent();

await browser.close();
console.log(JSON.stringify(seen));
