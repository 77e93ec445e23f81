//! `halfbyte bench models`: a model in several formats on several numbers of GPUs, as one table.

mod case;

use crate::app::App;
use crate::args::{Device, whole};
use crate::escape::escaped;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::text::{Align, bytes, rate, several, table};
use case::{Case, Published, Row};
use serde::Serialize;
use serde_json::Value;
use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks at a row that is being measured.
const LOOK: Duration = Duration::from_millis(20);

/// Time a model in several formats on several numbers of GPUs, one after the other, and print one table of them, with what others have
/// published beside it.
///
/// Weights are random. Each row is `bench model` in a process of its own, on the first GPUs, or on the first of those that --device
/// names; what does not fit is told in its row. With --device cpu rows of one GPU are timed on the CPU.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model, its rows and what was published, as TOML; bench/cases/bloom-models.toml is one.
    #[arg(long, value_name = "FILE.toml")]
    case: PathBuf,
    /// Repetitions of each measurement, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole::<u16>(1..))]
    repetitions: u16,
}

#[derive(Serialize)]
struct Report {
    origin: String,
    config: PathBuf,
    prompt_tokens: usize,
    generated_tokens: usize,
    batch: Vec<u16>,
    rows: Vec<Line>,
    published: Vec<Published>,
}

/// A row that was measured.
#[derive(Serialize)]
struct Line {
    format: String,
    gpus: u16,
    /// What `bench model --json` has printed.
    report: Option<Value>,
    /// Why there is none.
    error: Option<String>,
}

/// Measures.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let case = Case::read(&args.case)?;
    let devices = case.rows.iter().map(|row| device(app.device(), row.gpus)).collect::<Result<Vec<_>>>()?;
    let program = std::env::current_exe().map_err(|e| failed(&e))?;
    let (progress, cooperate) = (Progress::steps(app), interrupt::cooperate());
    let mut rows = Vec::new();
    for (row, device) in case.rows.iter().zip(devices) {
        progress.step(format!("row {} of {}: {} on {device}", rows.len() + 1, case.rows.len(), row.name()));
        let mut command = Command::new(&program);
        ask(&mut command, &case, row, &device);
        command.arg("--repetitions").arg(args.repetitions.to_string()).arg("--threads").arg(app.threads().to_string());
        let (report, error) = match measure(&mut command)? {
            Ok(report) => (Some(report), None),
            Err(error) => (None, Some(error)),
        };
        rows.push(Line { format: row.name().to_owned(), gpus: row.gpus, report, error });
    }
    drop((cooperate, progress));
    let Case { origin, config, prompt, generate, batch, published, .. } = case;
    let report = Report { origin, config, prompt_tokens: prompt, generated_tokens: generate, batch, rows, published };
    app.result(&report, human)?;
    verdict(&report.rows)
}

/// Error: a row that was not measured.
fn verdict(rows: &[Line]) -> Result<()> {
    let errors: Vec<&str> = rows.iter().filter_map(|row| row.error.as_deref()).collect();
    let Some(first) = errors.first() else { return Ok(()) };
    let what = format!("{} of {} rows failed", errors.len(), rows.len());
    Err(Failure::new(Exit::Device, what, first, "each row has its error; choose other formats or numbers of GPUs"))
}

/// Where a row of so many GPUs is measured, as `--device` takes it. Error: fewer are named than it needs.
fn device(named: &Device, gpus: u16) -> Result<String> {
    let count = usize::from(gpus);
    let numbers: Vec<u32> = match named {
        Device::Cpu if count == 1 => return Ok("cpu".to_owned()),
        Device::Cpu => {
            let cause = format!("a row has gpus = {gpus}, and --device says cpu");
            return Err(Failure::usage(
                "a CPU does not share a model with others here",
                cause,
                "use --device cuda, or rows with gpus = 1",
            ));
        }
        Device::Cuda(numbers) if !numbers.is_empty() => numbers.iter().copied().take(count).collect(),
        Device::Cuda(_) | Device::Auto => (0..u32::from(gpus)).collect(),
    };
    if numbers.len() < count {
        let cause = format!("a row has gpus = {gpus}, and --device names {}", numbers.len());
        return Err(Failure::usage("--device names fewer GPUs than a row needs", cause, "name more, or leave it out"));
    }
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    Ok(format!("cuda:{}", numbers.join(",")))
}

/// The arguments of a row, as `bench model` takes them.
fn ask(command: &mut Command, case: &Case, row: &Row, device: &str) {
    command.args(["bench", "model", "--json", "--quiet", "--device", device, "--random-weights"]).arg(&case.config);
    let sizes = [("--prompt", case.prompt), ("--generate", case.generate), ("--tp", row.gpus.into())];
    sizes.iter().for_each(|(option, size)| {
        command.arg(option).arg(size.to_string());
    });
    if let Some(format) = &row.format {
        command.args(["--format", format]);
    }
    if !case.batch.is_empty() {
        let texts: Vec<String> = case.batch.iter().map(u16::to_string).collect();
        command.arg("--batch").arg(texts.join(","));
    }
}

fn failed(why: &io::Error) -> Failure {
    Failure::device("a row cannot be measured by a process of its own", why.to_string())
}

/// All that comes through a pipe.
fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<io::Result<Vec<u8>>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut bytes))?;
        Ok(bytes)
    })
}

/// Runs a command until it ends: its report, or why it has none. Errors: it cannot be started, an interrupt, which ends it.
fn measure(command: &mut Command) -> Result<std::result::Result<Value, String>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| failed(&e))?;
    // Threads of their own, so that it never waits for a reader.
    let (out, err) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let status = loop {
        if interrupt::cancelled() {
            // It may have ended by the same signal.
            drop(child.kill());
            drop(child.wait());
            return Err(Failure::interrupted());
        }
        match child.try_wait().map_err(|e| failed(&e))? {
            Some(status) => break status,
            None => std::thread::sleep(LOOK),
        }
    };
    if status.code() == Some(Exit::Interrupted as i32) {
        return Err(Failure::interrupted());
    }
    let text = |reader: JoinHandle<io::Result<Vec<u8>>>| {
        let bytes = reader.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())).map_err(|e| failed(&e))?;
        Ok::<_, Failure>(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok(outcome(status, &text(out)?, &text(err)?))
}

/// What a process that has ended leaves: its report, or a line that says why there is none.
fn outcome(status: ExitStatus, out: &str, err: &str) -> std::result::Result<Value, String> {
    if status.success() {
        return serde_json::from_str(out).map_err(|e| format!("its report is no JSON: {e}"));
    }
    let last = err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let told: Value = serde_json::from_str(last).unwrap_or_default();
    Err(match (told["error"].as_str(), told["cause"].as_str().and_then(|cause| cause.lines().next())) {
        (Some(what), Some(cause)) => format!("{what}: {cause}"),
        _ => format!("it ended with {status}: {last}"),
    })
}

fn human(report: &Report) -> String {
    let Report { origin, config, prompt_tokens, generated_tokens, batch, rows, published } = report;
    let mut out = format!(
        "{}\n{}: prompts of {}, {} written, random weights\n",
        escaped(origin),
        escaped(&config.display().to_string()),
        several(*prompt_tokens, "token"),
        several(*generated_tokens, "token")
    );
    let devices = rows.iter().find_map(|row| row.report.as_ref()?["device"].as_str());
    out += &devices.map_or_else(|| "\n".to_owned(), |device| format!("first rank on {}\n\n", escaped(device)));
    let texts: Vec<String> = batch.iter().map(|texts| format!("{} tok/s", several((*texts).into(), "text"))).collect();
    let numbers = ["GPUs", "weights a GPU", "memory a GPU", "decode tok/s", "of limit", "prefill tok/s"];
    let mut columns = vec![("format", Align::Left)];
    columns.extend(numbers.into_iter().chain(texts.iter().map(String::as_str)).map(|name| (name, Align::Right)));
    if rows.iter().any(|row| row.error.is_some()) {
        columns.push(("error", Align::Left));
    }
    let cells = |row: &Line| {
        let mut cells = vec![row.format.clone(), row.gpus.to_string()];
        cells.extend(numbers_of(row.report.as_ref().unwrap_or(&Value::Null), batch));
        cells.resize(columns.len().min(cells.len() + 1), row.error.clone().unwrap_or_default());
        cells
    };
    out += &table(&columns, &rows.iter().map(cells).collect::<Vec<_>>());
    if !published.is_empty() {
        let names = ["published", "GPUs", "tok/s", "machine", "source"];
        let aligned = [Align::Left, Align::Right, Align::Right, Align::Left, Align::Left];
        let columns: Vec<_> = names.into_iter().zip(aligned).collect();
        let cells = |row: &Published| {
            let Published { what, gpus, machine, tokens_per_second, source } = row.clone();
            vec![what, gpus.to_string(), rate(tokens_per_second), machine, source]
        };
        out += &format!("\n{}", table(&columns, &published.iter().map(cells).collect::<Vec<_>>()));
    }
    out
}

/// The columns of numbers of a report of `bench model`, which tells the first rank's weights and memory; a dash where it has none.
fn numbers_of(report: &Value, batch: &[u16]) -> Vec<String> {
    let size = |name: &str| report[name].as_u64().map(bytes);
    let speed = |of: &Value, name: &str| of[name].as_f64().map(rate);
    let mut cells = vec![
        size("weight_bytes"),
        size("device_memory_bytes"),
        speed(report, "decode_tokens_per_second"),
        report["limits"]["decode_share"].as_f64().map(|share| format!("{:.0} %", 100.0 * share)),
        speed(report, "prefill_tokens_per_second"),
    ];
    let batches = report["batches"].as_array().map_or(&[][..], Vec::as_slice);
    cells.extend(batch.iter().map(|&texts| {
        let found = batches.iter().find(|found| found["texts"] == texts)?;
        speed(found, "tokens_per_second")
    }));
    cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_has_rows_errors_and_what_was_published() {
        let report = json!({
            "device": "cuda:0 (NVIDIA H200), activations f16", "weight_bytes": 48_100_000_000_u64, "device_memory_bytes": 53_100_000_000_u64,
            "decode_tokens_per_second": 64.52, "prefill_tokens_per_second": 2907.4, "limits": {"decode_share": 0.812},
            "batches": [{"texts": 4, "tokens_per_second": 250.0}, {"texts": 16, "tokens_per_second": 685.1}],
        });
        let line = |format: &str, gpus, report, error| Line { format: format.to_owned(), gpus, report, error };
        let published = Published {
            what: "fp16".to_owned(),
            gpus: 8,
            machine: "A100".to_owned(),
            tokens_per_second: 22.7,
            source: "a page".to_owned(),
        };
        let mut report = Report {
            origin: "a test".to_owned(),
            config: PathBuf::from("tiny.json"),
            prompt_tokens: 512,
            generated_tokens: 32,
            batch: vec![16],
            rows: vec![
                line("f16", 1, None, Some("it does not fit: 352 GB are needed".to_owned())),
                line("w4a16-g128", 2, Some(report), None),
            ],
            published: vec![published],
        };
        let expected = "\
a test
tiny.json: prompts of 512 tokens, 32 tokens written, random weights
first rank on cuda:0 (NVIDIA H200), activations f16

format      GPUs  weights a GPU  memory a GPU  decode tok/s  of limit  prefill tok/s  16 texts tok/s  error
f16            1              -             -             -         -              -               -  it does not fit: 352 GB are needed
w4a16-g128     2       48.10 GB      53.10 GB          64.5      81 %           2907             685

published  GPUs  tok/s  machine  source
fp16          8   22.7  A100     a page
";
        assert_eq!(human(&report), expected);
        let Err(Failure::Message(message)) = verdict(&report.rows) else { panic!("a row failed") };
        assert!(format!("{message:?}").contains("1 of 2 rows failed"));
        report.rows.remove(0);
        assert!(verdict(&report.rows).is_ok() && !human(&report).contains("error"));
    }

    #[test]
    fn devices_are_the_first_of_those_named() {
        let of = |named: &str, gpus| device(&named.parse().unwrap(), gpus);
        for (named, gpus, expected) in
            [("auto", 2, "cuda:0,1"), ("cuda", 1, "cuda:0"), ("cuda:3,1,2", 2, "cuda:3,1"), ("cpu", 1, "cpu")]
        {
            assert_eq!(of(named, gpus).unwrap(), expected, "{named}");
        }
        assert!(of("cpu", 2).is_err() && of("cuda:0,1", 3).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_process_leaves_a_report_or_a_line() {
        use std::os::unix::process::ExitStatusExt;
        let [done, refused, killed] = [0, 4 << 8, 9].map(ExitStatus::from_raw);
        assert_eq!(outcome(done, "{\"a\": 1}\n", "").unwrap()["a"], 1);
        assert!(outcome(done, "", "").unwrap_err().contains("no JSON"));
        let told = "a note\n{\"error\": \"it does not fit\", \"cause\": \"352 GB\\nand more\"}\n";
        assert_eq!(outcome(refused, "", told).unwrap_err(), "it does not fit: 352 GB");
        assert!(outcome(killed, "", "last words\n\n").unwrap_err().ends_with("last words"));
    }
}
