//! `halfbyte bench serve`: load on a server, and what it makes of it.

use crate::app::App;
use crate::args::whole;
use crate::escape::escaped;
use crate::failure::{Exit, Failure, Result};
use crate::progress::{Progress, Unit};
use crate::side_file;
use crate::text::{Align, rate, read_text, table};
use halfbyte_checkpoint::folder::Replacement;
use halfbyte_serve::bench::{
    Arrivals, Lengths, Outcome, Percentiles, Plan, Random, Report, Target, Wanted, run as make_requests, svg,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Measure a server of OpenAI's interface under load, of any make: times to the first token and for each further one, tokens a second.
///
/// Requests go to /v1/completions, streamed, with prompts of random token ids unless a file has others. The exit status is 1 where a
/// request failed.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("arrivals").required(true).args(["rate", "at_once"]))]
pub struct Args {
    /// The server.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// The model that requests name [default: the first that the server lists].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Requests a second, on average: they come by chance, whatever the server does (a Poisson process).
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// Requests at once: each that is answered is followed by the next.
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1..=65536))]
    at_once: Option<u32>,
    /// Requests in all [default: 100, or those of --prompts].
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1..))]
    requests: Option<u32>,
    /// Tokens of each prompt: as 512, 128..512, normal:512,64 or exponential:512.
    #[arg(long, value_name = "LENGTH", default_value = "512", conflicts_with = "prompts")]
    prompt: Lengths,
    /// Tokens of each answer, in the same way [default: what a line of --prompts says, else 128].
    #[arg(long, value_name = "LENGTH")]
    generate: Option<Lengths>,
    /// Random prompts are of ids from 10 to below this.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = whole::<u32>(11..))]
    vocab: u32,
    /// Prompts of a file: an object a line with prompt (a text or token ids), and max_tokens, which counts where there is no --generate.
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Let the model end its texts; else it is told to write as many tokens as were asked for.
    #[arg(long)]
    heed_eos: bool,
    /// Same seed, same requests.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Draw the distributions of both times.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Replace a plot that is there already.
    #[arg(long, requires = "plot")]
    overwrite: bool,
}

/// An API key for the server; a command line can be seen by others.
const KEY: &str = "HALFBYTE_API_KEY";

#[derive(Deserialize)]
struct Line {
    prompt: Value,
    max_tokens: Option<usize>,
}

#[derive(Serialize)]
struct Measured {
    url: String,
    model: Option<String>,
    arrivals: String,
    #[serde(flatten)]
    report: Report,
}

/// Measures.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let arrivals = match (args.rate, args.at_once) {
        (Some(rate), _) => Arrivals::Poisson(rate),
        (None, at_once) => Arrivals::AtOnce(at_once.unwrap_or(1) as usize),
    };
    let bad_rate = |why: String| Failure::usage("--rate is none", why, "give requests a second");
    arrivals.check().map_err(bad_rate)?;
    if let Some(path) = &args.plot {
        // Before the requests: whether it can be written there. An interrupt meanwhile leaves nothing.
        side_file::check("--plot", path, args.overwrite, &[], None)?;
    }
    let requests = requests(args)?;
    let key = std::env::var_os(KEY).map(|key| key.to_string_lossy().into_owned());
    let mut target = Target::new(&args.url, key, args.model.clone()).map_err(|why| {
        Failure::usage(format!("{} is no server", args.url), why, "give a URL as http://127.0.0.1:8080")
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(app.threads().min(4)).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::device("cannot start threads", e.to_string()))?;
    let all = requests.len();
    let progress = Progress::new(app, "requests", Unit::Things("requests"));
    let counted = Arc::new(AtomicUsize::new(0));
    let measured: Result<(Option<String>, Duration, Vec<Outcome>)> = runtime.block_on(async {
        let models = target.models().await.map_err(|why| {
            Failure::new(
                Exit::Device,
                format!("{} does not answer", args.url),
                why,
                "start a server: halfbyte serve MODEL",
            )
        })?;
        target.model = target.model.take().or_else(|| models.into_iter().next());
        let (model, target) = (target.model.clone(), Arc::new(target));
        let plan = Plan { arrivals, requests, ignore_eos: !args.heed_eos, seed: args.seed };
        let of_requests = counted.clone();
        let making = make_requests(target, plan, move |done| {
            of_requests.fetch_max(done, Ordering::Relaxed);
        });
        tokio::pin!(making);
        loop {
            tokio::select! {
                made = &mut making => {
                    let (took, outcomes) = made.map_err(bad_rate)?;
                    return Ok((model, took, outcomes));
                }
                () = tokio::time::sleep(Duration::from_millis(200)) => {
                    progress.at(counted.load(Ordering::Relaxed) as u64, all as u64);
                }
            }
        }
    });
    let (model, took, outcomes) = measured?;
    drop(progress);
    let report = Report::of(took, &outcomes);
    let arrivals = match arrivals {
        Arrivals::Poisson(rate) => format!("{rate} requests/s by chance"),
        Arrivals::AtOnce(count) => format!("{count} at once"),
    };
    if let Some(path) = &args.plot {
        let mut file = Replacement::create(path, args.overwrite, &[])?;
        let title = format!("{}, {arrivals}", model.as_deref().unwrap_or(&args.url));
        let drawn = svg(&title, &report, &outcomes);
        file.write_all(drawn.as_bytes()).map_err(|e| Failure::io("write", path, &e))?;
        file.commit()?;
    }
    let (failed, all) = (report.failed, report.answered + report.failed);
    let measured = Measured { url: args.url.clone(), model, arrivals, report };
    app.result(&measured, human)?;
    match failed {
        0 => Ok(()),
        _ => Err(Failure::new(
            Exit::No,
            format!("{failed} of {all} requests failed"),
            "see the errors above",
            "look at the server's own log",
        )),
    }
}

/// What is asked for.
fn requests(args: &Args) -> Result<Vec<Wanted>> {
    let mut random = Random::new(args.seed);
    let usual = args.generate.unwrap_or(Lengths::Fixed(128));
    let Some(path) = &args.prompts else {
        let ids = |count: usize, random: &mut Random| -> Vec<u32> {
            (0..count).map(|_| 10 + random.below(args.vocab as usize - 10) as u32).collect()
        };
        let wanted = |_| {
            let count = args.prompt.next(&mut random);
            Wanted { prompt: json!(ids(count, &mut random)), max_tokens: usual.next(&mut random) }
        };
        return Ok((0..args.requests.unwrap_or(100)).map(wanted).collect());
    };
    let bad = |line: usize, why: String| {
        let what = format!("{}, line {line}, is no request", path.display());
        Failure::new(Exit::Input, what, why, "each line is an object: {\"prompt\": \"...\", \"max_tokens\": 128}")
    };
    let mut lines = Vec::new();
    for (at, line) in read_text(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let Line { prompt, max_tokens } = serde_json::from_str(line).map_err(|e| bad(at + 1, e.to_string()))?;
        if !prompt.is_string() && !prompt.is_array() {
            return Err(bad(at + 1, "expected a prompt that is a text or a list of token ids".to_owned()));
        }
        let of_line = max_tokens.filter(|_| args.generate.is_none());
        lines.push(Wanted { prompt, max_tokens: of_line.unwrap_or_else(|| usual.next(&mut random)) });
    }
    if lines.is_empty() {
        return Err(bad(1, "expected at least one".to_owned()));
    }
    let count = args.requests.map_or(lines.len(), |n| n as usize);
    Ok(lines.iter().cycle().take(count).cloned().collect())
}

fn human(measured: &Measured) -> String {
    let Measured { arrivals, report, .. } = measured;
    let mut out = format!(
        "{arrivals}: {} answered, {} failed in {:.2} s\n{:.1} requests/s, {} new tokens/s, {} prompt tokens/s\n",
        report.answered,
        report.failed,
        report.seconds,
        report.requests_per_second,
        rate(report.new_tokens_per_second),
        rate(report.prompt_tokens_per_second),
    );
    let rows = [("first token", report.first_token), ("each token", report.each_token), ("whole answer", report.whole)];
    let row = |(name, of): (&str, Option<Percentiles>)| {
        let times = of.map(|of| [of.mean, of.p50, of.p90, of.p95, of.p99, of.max]);
        let times = times.map_or([(); 6].map(|()| "-".to_owned()), |of| of.map(|s| format!("{:.2}", 1000.0 * s)));
        [name.to_owned()].into_iter().chain(times).collect()
    };
    let names = ["ms", "mean", "p50", "p90", "p95", "p99", "max"];
    let columns: Vec<(&str, Align)> =
        names.iter().enumerate().map(|(at, name)| (*name, if at == 0 { Align::Left } else { Align::Right })).collect();
    out.push_str(&table(&columns, &rows.map(row)));
    if report.answered > 0 && report.first_token.is_none() {
        out.push_str("no answer had text: tokens that are not shown, as special ones, cannot be timed\n");
    }
    for (error, count) in &report.errors {
        // A String takes everything.
        let _ = writeln!(out, "{count} failed: {}", escaped(error));
    }
    out
}
