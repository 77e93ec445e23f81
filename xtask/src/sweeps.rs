//! `cargo xtask sweeps`: what `bench matmul --sweep --json` has measured, as the lines of `tests/it/cuda/sweeps`.

use halfbyte::cuda::matmul::wna16_sm90::config::every;
use halfbyte::cuda::tiled::Form;
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::{Float, Format};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt::Write;
use std::path::PathBuf;

/// Rows up to which only forms that may be chosen count: some that are not are fast behind themselves and slow in models.
const FEW_ROWS: u64 = 32;

const KINDS: [&str; 10] =
    ["few", "few-listed", "few-checked", "random", "listed", "checked", "offsets", "offsets-checked", "K-types", SYNC];

/// Products by `wna16_mma` and `wna8_mma`, all of whose forms may be chosen.
const SYNC: &str = "sync";

#[derive(clap::Args)]
pub struct Args {
    /// Files of results of `wna16_sm90`, of more than 32 rows of `wna8_sm90`, and of the kernels by mma.sync
    #[arg(required = true, value_name = "RESULTS.json")]
    files: Vec<PathBuf>,
    /// What the products are for: few or random to fit the model of the machine to, few-checked or checked to check it; offsets and
    /// offsets-checked likewise, of weights with float offsets; K-types to check it; sync to fit that of kernels by mma.sync to
    #[arg(long, value_parser = KINDS)]
    kind: String,
}

pub fn run(args: &Args) -> Result<(), String> {
    for file in &args.files {
        let named = |why: String| format!("{}: {why}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| named(e.to_string()))?;
        print!("{}", lines(&text, &args.kind).map_err(named)?);
    }
    Ok(())
}

/// A line for each product, and below it one for each configuration, the fastest first.
fn lines(json: &str, kind: &str) -> Result<String, String> {
    let report: Value = serde_json::from_str(json).map_err(|e| e.to_string())?;
    let results = report.get("results").and_then(Value::as_array).ok_or("results: a list was expected")?;
    let mut out = String::new();
    for result in results {
        let text = |name: &str| result.get(name).and_then(Value::as_str).ok_or(format!("{name}: a text was expected"));
        let size =
            |name: &str| result.get(name).and_then(Value::as_u64).ok_or(format!("{name}: a number was expected"));
        let (format, y) = (text("format")?, text("y")?);
        let [m, n, k] = [size("m")?, size("n")?, size("k")?];
        let others = result.get("others").and_then(Value::as_array).ok_or("others: a list was expected")?;
        let time =
            |of: &Value, name: &str| of.get(name).and_then(Value::as_f64).ok_or(format!("{name}: a time was expected"));
        let mut times = vec![(time(result, "chosen_us")?, text("chosen")?)];
        for other in others {
            let config = other.get("config").and_then(Value::as_str).ok_or("config: a text was expected")?;
            times.push((time(other, "median_us")?, config));
        }
        if m <= FEW_ROWS && kind != SYNC {
            let may_be_chosen = forms(format, y, k)?;
            times.retain(|(_, config)| may_be_chosen.contains(*config));
        }
        times.sort_by(|one, other| one.0.total_cmp(&other.0));
        let _ = writeln!(out, "{format} {y} {m} {n} {k} {kind}");
        for (us, config) in times {
            let _ = writeln!(out, "  {us:.2} {config}");
        }
    }
    Ok(out)
}

/// Names of the forms that may be chosen for a format and y of a type.
fn forms(format: &str, y: &str, k: u64) -> Result<HashSet<String>, String> {
    let parsed: Format = format.parse().map_err(|e| format!("format: {e}"))?;
    let k = usize::try_from(k).map_err(|e| e.to_string())?;
    let atom = Atom::of_any(parsed.weight, k).map_err(|e| format!("{format}: {e}"))?;
    let of_halves = Atom { bits: if atom.bits == 8 { 6 } else { 4 }, multiples: true, ..atom };
    // Scales in f32 are timed as GGUF's K types have them.
    let atom = if atom.scale == Float::F32 { of_halves } else { atom };
    let types = [Float::F16, Float::BF16, Float::F32];
    let y = types.into_iter().find(|of| of.name() == y).ok_or(format!("y: f16, bf16 or f32 was expected, not {y}"))?;
    Ok(every(&Form::floats(atom, y)).iter().map(ToString::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const RESULTS: &str = r#"{"schema": 1, "left": 0, "results": [
        {"format": "w4a16-g128", "x": "f16", "y": "f16", "m": 16, "n": 28672, "k": 4096, "baseline_us": 84.5,
         "chosen": "n16 2x2 wgmma late w4 x4/2 split 2 blocks 2", "chosen_us": 18.014,
         "others": [{"config": "n16 2x2 mma late w8 x8/2 trigger 8 prefetch 4", "median_us": 17.5},
                    {"config": "n16 2x2 wgmma late w8 x8/2 trigger 1", "median_us": 17.999}]},
        {"format": "w4a16-g32", "x": "f16", "y": "f32", "m": 64, "n": 512, "k": 640, "baseline_us": null,
         "chosen": "any", "chosen_us": 2.0, "others": [{"config": "another", "median_us": 1.5}]}]}"#;

    #[test]
    fn results_become_lines_and_few_rows_lose_what_is_not_chosen() {
        let want = "w4a16-g128 f16 16 28672 4096 few\n  18.00 n16 2x2 wgmma late w8 x8/2 trigger 1\n  \
                    18.01 n16 2x2 wgmma late w4 x4/2 split 2 blocks 2\nw4a16-g32 f32 64 512 640 few\n  1.50 another\n  2.00 any\n";
        assert_eq!(lines(RESULTS, "few").unwrap(), want);
    }

    #[test]
    fn what_is_no_sweep_is_refused_by_name() {
        for (json, why) in [
            ("", "EOF"),
            ("{}", "results"),
            (r#"{"results": [{}]}"#, "format"),
            (&RESULTS.replace("chosen_us", "us"), "chosen_us"),
            (&RESULTS.replace("w4a16-g128", "w9"), "format"),
            (&RESULTS.replace("\"y\": \"f16\"", "\"y\": \"f8\""), "f8"),
        ] {
            let got = lines(json, "few").unwrap_err();
            assert!(got.contains(why), "{got}");
        }
    }

    /// The lines in the tree are such.
    #[test]
    fn lines_in_the_tree_are_of_known_kinds() {
        for device in ["nvidia-h100", "nvidia-h200", "nvidia-h200-a8", "nvidia-h200-sync"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/halfbyte/tests/it/cuda/sweeps");
            let text = std::fs::read_to_string(folder.join(device).with_extension("txt")).unwrap();
            let kinds: HashSet<&str> =
                text.lines().filter(|line| !line.starts_with("  ")).filter_map(|line| line.split(' ').nth(5)).collect();
            let args = <Args as clap::Args>::augment_args(clap::Command::new("sweeps"));
            let known: HashSet<String> = args
                .get_arguments()
                .filter(|arg| arg.get_id() == "kind")
                .flat_map(clap::Arg::get_possible_values)
                .map(|value| value.get_name().to_owned())
                .collect();
            assert!(!kinds.is_empty() && kinds.iter().all(|kind| known.contains(*kind)), "{device}: {kinds:?}");
        }
    }
}
