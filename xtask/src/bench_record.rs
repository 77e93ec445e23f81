//! `cargo xtask bench-record`: what `halfbyte bench matmul` measures, as a file that is committed.
//!
//! What was measured on a machine without this repository, as one with a GPU, comes as the report that it printed with `--json`.

use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(clap::Args)]
pub struct Args {
    /// Shapes, formats and rows.
    #[arg(long, default_value = "bench/cases/llama.toml")]
    case: PathBuf,
    /// A report that `halfbyte bench matmul --json` has printed elsewhere, instead of running it here.
    #[arg(long, requires = "commit")]
    report: Option<PathBuf>,
    /// The commit that the report was made with.
    #[arg(long, requires = "report")]
    commit: Option<String>,
    /// More arguments for `halfbyte bench matmul`, as `-- --x bf16`.
    #[arg(last = true)]
    more: Vec<String>,
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

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let mut command = vec!["bench".to_owned(), "matmul".into(), "--case".into(), args.case.display().to_string()];
    command.extend(args.more.iter().cloned());
    command.push("--json".into());
    let report = match &args.report {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
            serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?
        }
        None => halfbyte(root, &command)?,
    };
    let processor = match report["device"].as_str() {
        Some(device) => device.to_owned(),
        None => {
            let doctor = halfbyte(root, &["doctor".into(), "--json".into()])?;
            doctor["cpu"].as_str().ok_or("doctor names no processor")?.to_owned()
        }
    };
    let columns = if report["device"].is_string() { DEVICE_COLUMNS } else { COLUMNS };
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
    for (when, limits) in [("before", &report["roofline_before"]), ("after", &report["roofline_after"])] {
        let limits = limits.as_object().ok_or("the report has no roofline")?;
        let list: Vec<String> = limits.iter().map(|(name, value)| format!("{name} {}", text(value))).collect();
        line(&mut out, &format!("limits {when}: {}", list.join(", ")))?;
    }
    writeln!(out, "{}", columns.join(",")).map_err(|e| e.to_string())?;
    for result in report["results"].as_array().ok_or("the report has no results")? {
        let cells: Vec<String> = columns.iter().map(|&column| text(&result[column])).collect();
        writeln!(out, "{}", cells.join(",")).map_err(|e| e.to_string())?;
    }

    let folder = root.join("bench/record").join(slug(&processor));
    let case = args.case.file_stem().map_or_else(|| "case".into(), |s| s.to_string_lossy().into_owned());
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

/// A number short, a text without quotes.
fn text(value: &Value) -> String {
    match value {
        Value::Number(n) => n
            .as_f64()
            .map_or_else(|| n.to_string(), |v| if v.fract() == 0.0 { format!("{v}") } else { format!("{v:.1}") }),
        Value::String(s) => s.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
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
