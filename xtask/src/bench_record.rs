//! `cargo xtask bench-record`: what `halfbyte bench` measures, as a file that is committed.
//!
//! What was measured on a machine without this repository, as one with a GPU, comes as the report that it printed with `--json`.
//!
//! On a machine that others use too, or beside other software, one measurement says little: `--rounds` repeats it, with the
//! other software after each round. Other work only ever adds time, and by spells: of the rounds' medians the least is kept, ours
//! and theirs, and of what the machine could do the most.

use crate::bench_models;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(clap::Args)]
pub struct Args {
    /// What is measured.
    #[arg(long, value_enum, default_value = "matmul")]
    bench: Bench,
    /// Shapes, formats and rows [default: bench/cases/llama.toml, for convolutions resnet50.toml, for models
    /// bloom-models.toml].
    #[arg(long)]
    case: Option<PathBuf>,
    /// How often it is measured; of the rounds the one with the least median is kept, line by line.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// After each round, time what other software takes for the same: a Python with bench/peers/requirements.txt. Convolutions only.
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// A report that `halfbyte bench` has printed elsewhere with `--json`, instead of running it here: with what it was made with, its
    /// `--case` and further arguments too.
    #[arg(long, requires_all = ["commit", "date", "case"], conflicts_with_all = ["rounds", "peers"])]
    report: Option<PathBuf>,
    /// The commit that the report was made with.
    #[arg(long, requires = "report")]
    commit: Option<String>,
    /// The day on which the report was made.
    #[arg(long, value_name = "YYYY-MM-DD", requires = "report", value_parser = date)]
    date: Option<String>,
    /// More arguments for `halfbyte bench`, as `-- --x bf16`.
    #[arg(last = true)]
    more: Vec<String>,
}

/// A day as records have it.
fn date(text: &str) -> Result<String, String> {
    let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|byte| byte.is_ascii_digit());
    match text.split('-').collect::<Vec<_>>()[..] {
        [year, month, day] if digits(year, 4) && digits(month, 2) && digits(day, 2) => Ok(text.to_owned()),
        _ => Err("expected a day as 2026-11-30".to_owned()),
    }
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Bench {
    Matmul,
    Conv,
    Models,
}

impl Bench {
    fn name(self) -> &'static str {
        match self {
            Bench::Matmul => "matmul",
            Bench::Conv => "conv",
            Bench::Models => "models",
        }
    }

    fn case(self) -> &'static str {
        match self {
            Bench::Matmul => "bench/cases/llama.toml",
            Bench::Conv => "bench/cases/resnet50.toml",
            Bench::Models => "bench/cases/bloom-models.toml",
        }
    }

    fn columns(self, device: bool) -> &'static [&'static str] {
        match self {
            Bench::Matmul if device => DEVICE_COLUMNS,
            Bench::Matmul => COLUMNS,
            Bench::Conv => CONV_COLUMNS,
            // Theirs follow from the report.
            Bench::Models => &[],
        }
    }
}

/// On a processor.
const COLUMNS: &[&str] = &[
    "format",
    "x",
    "m",
    "n",
    "k",
    "kernel",
    "median_us",
    "least_us",
    "gflop_per_s",
    "weights_gb_per_s",
    "roofline_percent",
    "limit",
    "times_baseline",
];

/// On a GPU.
const DEVICE_COLUMNS: &[&str] = &[
    "format",
    "x",
    "m",
    "n",
    "k",
    "kernel",
    "median_us",
    "least_us",
    "gflop_per_s",
    "weights_gb_per_s",
    "read_us",
    "limit_us",
    "roofline_percent",
    "limit",
    "baseline_us",
    "times_baseline",
];

/// Convolutions.
const CONV_COLUMNS: &[&str] = &[
    "format",
    "x",
    "layout",
    "batch",
    "ci",
    "co",
    "size",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "kernel",
    "median_us",
    "least_us",
    "gflop_per_s",
    "peak_percent",
    "peak",
    "baseline_us",
    "times_baseline",
];

/// What bench/peers/conv_onnxruntime.py times, in microseconds.
const PEER_COLUMNS: &[&str] = &["qlinear_conv_us", "qlinear_conv_nhwc_us", "conv_us"];

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let case = args.case.clone().unwrap_or_else(|| args.bench.case().into());
    let mut command = vec!["bench".to_owned(), args.bench.name().into(), "--case".into(), case.display().to_string()];
    command.extend(args.more.iter().cloned());
    command.push("--json".into());
    if args.peers.is_some() && args.bench != Bench::Conv {
        return Err("other software is timed on convolutions only: add --bench conv".into());
    }
    if args.rounds > 1 && args.bench == Bench::Models {
        return Err("models are measured in one round: `-- --repetitions N` repeats what is timed".into());
    }
    let (mut reports, mut peers) = (Vec::new(), Vec::new());
    match &args.report {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
            reports.push(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?);
        }
        None => {
            for round in 1..=args.rounds {
                eprintln!("round {round} of {}", args.rounds);
                let report = halfbyte(root, &command)?;
                if let Some(python) = &args.peers {
                    peers.push(peer(root, python, &case, &report["threads"])?);
                }
                reports.push(report);
            }
        }
    }
    let report = &reports[0];
    let machine = match args.bench {
        Bench::Models => bench_models::machine(report).ok_or("no row of the report was measured")?,
        _ => report.clone(),
    };
    let processor = match machine["device"].as_str() {
        Some(device) => device.to_owned(),
        None => {
            let doctor = halfbyte(root, &["doctor".into(), "--json".into()])?;
            doctor["cpu"].as_str().ok_or("doctor names no processor")?.to_owned()
        }
    };
    let columns = args.bench.columns(machine["device"].is_string());
    let date = match &args.date {
        Some(date) => date.clone(),
        None => text_of(Command::new("date").args(["-u", "+%Y-%m-%d"]))?,
    };
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => text_of(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root))?,
    };

    let mut out = String::new();
    let line = |out: &mut String, text: &str| writeln!(out, "# {text}").map_err(|e| e.to_string());
    let with = match machine["device"].is_string() {
        true => format!("driver for CUDA {}", text(&machine["driver"])),
        false => format!("{} threads, {}", machine["threads"], text(&machine["isa"])),
    };
    line(&mut out, &format!("{date}, {processor}, {with}"))?;
    line(&mut out, &format!("commit {commit}: cargo run --release -- {}", command.join(" ")))?;
    if reports.len() > 1 {
        line(&mut out, &format!("{} rounds, of each line the one with the least median", reports.len()))?;
    }
    if let Some(peer) = peers.first() {
        let what = "after each round, on cold weights and images in turn";
        line(&mut out, &format!("{}, {} threads, {what}: {PEER}", text(&peer["software"]), text(&peer["threads"])))?;
    }
    for (when, key) in [("before", "roofline_before"), ("after", "roofline_after")] {
        let Some(limits) = report[key].as_object() else { continue };
        let most = |name: &str| best(reports.iter().map(|report| &report[key][name]), f64::max);
        let list: Vec<String> = limits.keys().map(|name| format!("{name} {}", text(&most(name)))).collect();
        line(&mut out, &format!("limits {when}: {}", list.join(", ")))?;
    }
    if let Some(read) = report["read_gb_per_s"].as_f64() {
        line(&mut out, &format!("limits: read_gb_per_s {}", text(&read.into())))?;
    }
    if args.bench == Bench::Models {
        return write_record(args, &processor, &date, &case, &(out + &bench_models::record(report)?));
    }
    let peer_columns = if peers.is_empty() { &[] } else { PEER_COLUMNS };
    writeln!(out, "{}", [columns, peer_columns].concat().join(",")).map_err(|e| e.to_string())?;
    for (i, result) in report["results"].as_array().ok_or("the report has no results")?.iter().enumerate() {
        let time = |report: &&Value| report["results"][i]["median_us"].as_f64().unwrap_or(f64::INFINITY);
        let round = reports.iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(report);
        let of_round = |column: &str| match (column, share_of_peak(&round["results"][i], &reports)) {
            ("peak_percent", Some(percent)) => text(&percent.into()),
            _ => text(&round["results"][i][column]),
        };
        let of_peers = |column: &str| {
            let same = |line: &&Value| ["origin", "batch"].iter().all(|key| line[key] == result[key]);
            let lines = peers.iter().map(|peer| peer["results"].as_array()?.iter().find(same));
            let lines = lines.collect::<Option<Vec<_>>>().ok_or(format!("{PEER} left out {}", result["origin"]))?;
            Ok::<_, String>(text(&best(lines.into_iter().map(|line| &line[column]), f64::min)))
        };
        let mut cells: Vec<String> = columns.iter().map(|&column| of_round(column)).collect();
        cells.extend(peer_columns.iter().map(|&column| of_peers(column)).collect::<Result<Vec<_>, _>>()?);
        writeln!(out, "{}", cells.join(",")).map_err(|e| e.to_string())?;
    }

    write_record(args, &processor, &date, &case, &out)
}

/// Writes a record where it belongs.
fn write_record(args: &Args, processor: &str, date: &str, case: &Path, out: &str) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let folder = root.join("bench/record").join(slug(processor));
    let case = case.file_stem().map_or_else(|| "case".into(), |s| s.to_string_lossy().into_owned());
    let name =
        slug(&[date, &case].into_iter().chain(args.more.iter().map(String::as_str)).collect::<Vec<_>>().join(" "));
    let path = folder.join(format!("{name}.csv"));
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut file = std::fs::File::create_new(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    file.write_all(out.as_bytes()).map_err(|e| format!("{}: {e}", path.display()))?;
    print!("{out}");
    eprintln!("written to {}", path.display());
    Ok(())
}

/// Letters and digits, what lies between them as one dash; trade marks are left out.
fn slug(text: &str) -> String {
    let text = text.replace("(R)", "").replace("(TM)", "");
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// The best of numbers; null if one is none.
fn best<'a>(values: impl Iterator<Item = &'a Value>, better: fn(f64, f64) -> f64) -> Value {
    let numbers: Option<Vec<f64>> = values.map(Value::as_f64).collect();
    numbers.and_then(|numbers| numbers.into_iter().reduce(better)).map_or(Value::Null, Value::from)
}

/// What share a line has of the peak that it names, the greatest that was measured in any round; None if it names none.
fn share_of_peak(line: &Value, reports: &[Value]) -> Option<f64> {
    let name = line["peak"].as_str()?;
    let limits = reports.iter().flat_map(|report| [&report["roofline_before"], &report["roofline_after"]]);
    let peaks = limits.filter_map(|limits| {
        limits.as_object()?.iter().find(|(key, _)| key.split('_').next() == Some(name))?.1.as_f64()
    });
    Some(100.0 * line["gflop_per_s"].as_f64()? / peaks.reduce(f64::max)?)
}

/// A number short, a text without quotes, sizes with a cross between them.
pub fn text(value: &Value) -> String {
    match value {
        Value::Number(n) => n
            .as_f64()
            .map_or_else(|| n.to_string(), |v| if v.fract() == 0.0 { format!("{v}") } else { format!("{v:.1}") }),
        Value::String(s) => s.clone(),
        Value::Null => String::new(),
        Value::Array(sizes) => sizes.iter().map(text).collect::<Vec<_>>().join("x"),
        other => other.to_string(),
    }
}

/// The script that times onnxruntime.
const PEER: &str = "bench/peers/conv_onnxruntime.py";

/// What other software takes for the convolutions of a case.
fn peer(root: &Path, python: &Path, case: &Path, threads: &Value) -> Result<Value, String> {
    let mut command = Command::new(python);
    command.arg(PEER).arg("--case").arg(case).arg("--threads").arg(threads.to_string()).current_dir(root);
    serde_json::from_str(&text_of(&mut command)?).map_err(|e| format!("{PEER}: {e}"))
}

/// Runs the command line of this repository, built for release, and parses what it prints.
fn halfbyte(root: &Path, args: &[String]) -> Result<Value, String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--release", "--package", "halfbyte-cli", "--"]).args(args).current_dir(root);
    serde_json::from_str(&text_of(&mut command)?).map_err(|e| format!("halfbyte {}: {e}", args.join(" ")))
}

fn text_of(command: &mut Command) -> Result<String, String> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
