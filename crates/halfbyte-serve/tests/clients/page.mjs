// The page in a browser without a screen: page.mjs URL KEY [SCREENSHOT]. A conversation, a stop, an error. Says "ok" or fails.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [url, key, screenshot] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1240, height: 840 }, colorScheme: "light" });
const wrong = [];
page.on("pageerror", (error) => wrong.push(error.message));
page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("data:") || wrong.push(request.url()));
await page.goto(url);

// Without the key there is an error that says so.
await page.getByRole("alert").waitFor();
assert.match(await page.getByRole("alert").innerText(), /API key/);
await page.getByLabel("API key").fill(key);
await page.getByLabel("API key").press("Tab");
await page.locator("#model option", { hasText: "chat" }).waitFor({ state: "attached" });
await page.getByLabel("Model", { exact: true }).selectOption("chat");

// A conversation, by keyboard.
const message = page.getByLabel("Message", { exact: true });
await page.getByLabel("Temperature").fill("0");
await page.getByLabel("Most new tokens").fill("60");
await message.fill("Write a function that reads a file.");
await message.press("Enter");
const answers = page.locator("article.assistant");
await page.locator("article.assistant:not(.busy)").first().waitFor();
const first = await answers.first().locator(".text").textContent();
assert(first.length > 10, first);
assert.match(await page.locator("#speed").innerText(), /tokens\/s, first after/);
assert.equal(await page.locator("#said").textContent(), `Model: ${first}`);

// Again, at temperature 0: the same.
await page.getByRole("button", { name: "Regenerate" }).click();
await page.waitForFunction(() => document.querySelectorAll("article.assistant:not(.busy)").length === 1);
assert.equal(await answers.first().locator(".text").textContent(), first);

// Stopped in the middle.
await page.getByLabel("Most new tokens").fill("900");
await page.getByLabel("Temperature").fill("1");
await message.fill("And one that writes it, with all that belongs to it.");
await message.press("Enter");
await page.waitForFunction(() => (document.querySelectorAll("article.assistant")[1]?.querySelector(".text").textContent.length ?? 0) > 20);
await page.waitForTimeout(1200);
if (screenshot) {
  await page.screenshot({ path: screenshot });
  await page.emulateMedia({ colorScheme: "dark" });
  await page.screenshot({ path: screenshot.replace(/\.png$/, "-dark.png") });
  await page.emulateMedia({ colorScheme: "light" });
}
if (await page.getByRole("button", { name: "Stop" }).isEnabled()) {
  await page.keyboard.press("Escape");
  await page.locator("article.assistant .note", { hasText: "Stopped." }).waitFor();
}
await page.waitForFunction(() => document.querySelector("#running").textContent === "0");
assert.match(await page.locator("#pages").innerText(), /^0 of \d+ in use$/);

// A refusal is told, and the conversation can go on.
await page.getByLabel("Temperature").fill("9");
await message.fill("Hotter.");
await message.press("Enter");
await page.getByRole("alert").waitFor();
assert.match(await page.getByRole("alert").innerText(), /temperature/);
await page.getByRole("button", { name: "New conversation" }).click();
assert.equal(await page.locator("article").count(), 0);

// Everything that can be used has a name.
const nameless = await page.evaluate(() =>
  [...document.querySelectorAll("button, input, select, textarea")].filter((field) => !field.labels?.length && !field.textContent.trim() && !field.ariaLabel).map((field) => field.id),
);
assert.deepEqual(nameless, []);
assert.deepEqual(wrong, []);
await browser.close();
console.log("ok");
