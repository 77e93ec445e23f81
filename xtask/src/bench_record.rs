//! `cargo xtask bench-record`: what `halfbyte bench` measures, as a file that is committed.
//!
//! What was measured on a machine without this repository, as one with a GPU, comes as the report that it printed with `--json`.
//!
//! On a machine that others use too, or beside other software, one measurement says little: `--rounds` repeats it, with the
//! other software after each round, and keeps the median of every number.

use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(clap::Args)]
pub struct Args {
    /// What is measured.
    #[arg(long, value_enum, default_value = "matmul")]
    bench: Bench,
    /// Shapes, formats and rows [default: bench/cases/llama.toml, for convolutions resnet50.toml].
    #[arg(long)]
    case: Option<PathBuf>,
    /// How often it is measured; of each number the median is kept.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// After each round, time what other software takes for the same: a Python with bench/peers/requirements.txt. Convolutions only.
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// A report that `halfbyte bench matmul --json` has printed elsewhere, instead of running it here.
    #[arg(long, requires = "commit", conflicts_with_all = ["bench", "rounds", "peers"])]
    report: Option<PathBuf>,
    /// The commit that the report was made with.
    #[arg(long, requires = "report")]
    commit: Option<String>,
    /// More arguments for `halfbyte bench`, as `-- --x bf16`.
    #[arg(last = true)]
    more: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Bench {
    Matmul,
    Conv,
}

impl Bench {
    fn name(self) -> &'static str {
        match self {
            Bench::Matmul => "matmul",
            Bench::Conv => "conv",
        }
    }

    fn case(self) -> &'static str {
        match self {
            Bench::Matmul => "bench/cases/llama.toml",
            Bench::Conv => "bench/cases/resnet50.toml",
        }
    }

    fn columns(self, device: bool) -> &'static [&'static str] {
        match self {
            Bench::Matmul if device => DEVICE_COLUMNS,
            Bench::Matmul => COLUMNS,
            Bench::Conv => CONV_COLUMNS,
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

/// Convolutions, on a processor.
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
    let (first, last) = (&reports[0], &reports[reports.len() - 1]);
    let report = first;
    let processor = match report["device"].as_str() {
        Some(device) => device.to_owned(),
        None => {
            let doctor = halfbyte(root, &["doctor".into(), "--json".into()])?;
            doctor["cpu"].as_str().ok_or("doctor names no processor")?.to_owned()
        }
    };
    let columns = args.bench.columns(report["device"].is_string());
    let date = text_of(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => text_of(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root))?,
    };

    let mut out = String::new();
    let line = |out: &mut String, text: &str| writeln!(out, "# {text}").map_err(|e| e.to_string());
    let with = match report["device"].is_string() {
        true => format!("driver for CUDA {}", text(&report["driver"])),
        false => format!("{} threads, {}", report["threads"], text(&report["isa"])),
    };
    line(&mut out, &format!("{date}, {processor}, {with}"))?;
    line(&mut out, &format!("commit {commit}: cargo run --release -- {}", command.join(" ")))?;
    if reports.len() > 1 {
        line(&mut out, &format!("{} rounds, of each number the median", reports.len()))?;
    }
    if let Some(peer) = peers.first() {
        let what = "after each round, on cold weights and images in turn";
        line(&mut out, &format!("{}, {} threads, {what}: {PEER}", text(&peer["software"]), text(&peer["threads"])))?;
    }
    for (when, limits) in [("before", &first["roofline_before"]), ("after", &last["roofline_after"])] {
        let limits = limits.as_object().ok_or("the report has no roofline")?;
        let list: Vec<String> = limits.iter().map(|(name, value)| format!("{name} {}", text(value))).collect();
        line(&mut out, &format!("limits {when}: {}", list.join(", ")))?;
    }
    let peer_columns = if peers.is_empty() { &[] } else { PEER_COLUMNS };
    writeln!(out, "{}", [columns, peer_columns].concat().join(",")).map_err(|e| e.to_string())?;
    for (i, result) in report["results"].as_array().ok_or("the report has no results")?.iter().enumerate() {
        let of_rounds = |column: &str| median(reports.iter().map(|report| &report["results"][i][column]));
        let of_peers = |column: &str| {
            let same = |line: &&Value| ["origin", "batch"].iter().all(|key| line[key] == result[key]);
            let lines = peers.iter().map(|peer| peer["results"].as_array()?.iter().find(same));
            let lines = lines.collect::<Option<Vec<_>>>().ok_or(format!("{PEER} left out {}", result["origin"]))?;
            Ok::<_, String>(median(lines.into_iter().map(|line| &line[column])))
        };
        let mut cells: Vec<String> = columns.iter().map(|&column| of_rounds(column)).collect();
        cells.extend(peer_columns.iter().map(|&column| of_peers(column)).collect::<Result<Vec<_>, _>>()?);
        writeln!(out, "{}", cells.join(",")).map_err(|e| e.to_string())?;
    }

    let folder = root.join("bench/record").join(slug(&processor));
    let case = case.file_stem().map_or_else(|| "case".into(), |s| s.to_string_lossy().into_owned());
    let name = slug(
        &[date.as_str(), &case].into_iter().chain(args.more.iter().map(String::as_str)).collect::<Vec<_>>().join(" "),
    );
    let path = folder.join(format!("{name}.csv"));
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    std::fs::write(&path, &out).map_err(|e| format!("{}: {e}", path.display()))?;
    print!("{out}");
    eprintln!("written to {}", path.display());
    Ok(())
}

/// Letters and digits, what lies between them as one dash.
fn slug(text: &str) -> String {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// The median of numbers; of anything else the first.
fn median<'a>(values: impl Iterator<Item = &'a Value>) -> String {
    let values: Vec<&Value> = values.collect();
    let numbers: Option<Vec<f64>> = values.iter().map(|value| value.as_f64()).collect();
    match numbers {
        Some(mut numbers) if numbers.len() > 1 => {
            numbers.sort_by(f64::total_cmp);
            let middle = numbers.len() / 2;
            let pair = if numbers.len() % 2 == 1 { [middle; 2] } else { [middle - 1, middle] };
            text(&Value::from(pair.map(|i| numbers[i]).iter().sum::<f64>() / 2.0))
        }
        _ => values.first().map_or_else(String::new, |value| text(value)),
    }
}

/// A number short, a text without quotes, sizes with a cross between them.
fn text(value: &Value) -> String {
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
