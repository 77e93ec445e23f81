//! `cargo xtask bench-results`: the records in bench/record as the tables of bench/RESULTS.md.
//!
//! A record of products becomes a row for each format and weight, with a column for each number of rows; one of convolutions a
//! line for each layer and format; one of a model a line for each format and number of GPUs. Nothing else is in the file, so that a test can make it anew and compare.

use crate::bench_models;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {}

const FILE: &str = "bench/RESULTS.md";

const HEAD: &str = "# Measured\n\nMade by `cargo xtask bench-results` from the records in `bench/record`, which `cargo xtask bench-record` \
writes; each has its machine, date, commit and command. Times are medians in microseconds on cold data.\n";

pub fn run(_: &Args) -> Result<(), String> {
    let root = root()?;
    let path = root.join(FILE);
    std::fs::write(&path, text(&root)?).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

fn root() -> Result<PathBuf, String> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?.to_owned())
}

fn text(root: &Path) -> Result<String, String> {
    let mut out = HEAD.to_owned();
    for machine in sorted(&root.join("bench/record"))? {
        for file in sorted(&machine)? {
            let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            out +=
                &record(&text).ok_or_else(|| format!("{}: expected a record with a line of names", file.display()))?;
        }
    }
    Ok(out)
}

pub fn sorted(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

/// One record as a section. None: it has no line of names.
fn record(text: &str) -> Option<String> {
    let mut comments = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches("# "));
    let mut out = format!("\n## {}\n\n", comments.next()?);
    for line in comments {
        match line.split_once(": ") {
            Some((commit, command)) if commit.starts_with("commit ") => {
                writeln!(out, "* `{command}`, {commit}").ok()?
            }
            _ => writeln!(out, "* {line}").ok()?,
        }
    }
    let rows = read_rows(text)?;
    out.push('\n');
    let first = rows.first()?;
    out += &match (first.contains_key("m"), first.contains_key("gpus")) {
        (true, _) => products(&rows)?,
        (_, true) => bench_models::table(&rows)?,
        _ => convolutions(&rows)?,
    };
    Some(out)
}

/// The rows of a record by the names of their columns. None: it has no line of names.
pub fn read_rows(record: &str) -> Option<Vec<Row<'_>>> {
    let mut lines = record.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<&str> = lines.next()?.split(',').collect();
    Some(lines.map(|line| names.iter().copied().zip(line.split(',')).collect()).collect())
}

/// A row of a record by the names of its columns.
pub type Row<'a> = BTreeMap<&'a str, &'a str>;

/// A row for each weight, format and type of x; a column for each number of rows of x.
fn products(rows: &[Row<'_>]) -> Option<String> {
    let mut numbers: Vec<usize> = rows.iter().map(|row| row.get("m")?.parse().ok()).collect::<Option<_>>()?;
    numbers.sort_unstable();
    numbers.dedup();
    let mut out = String::from("| (n, k) | format, x |");
    numbers.iter().for_each(|m| out += &format!(" m = {m} |"));
    out += &format!("\n|---|---|{}\n", "--:|".repeat(numbers.len()));
    let mut weights: Vec<[&str; 4]> = Vec::new();
    for row in rows {
        let weight = ["n", "k", "format", "x"].map(|name| row.get(name).copied().unwrap_or_default());
        if !weights.contains(&weight) {
            weights.push(weight);
        }
    }
    for [n, k, format, x] in weights {
        let of = |row: &&Row<'_>| ["n", "k", "format", "x"].map(|name| row[name]) == [n, k, format, x];
        let cell = |m: &usize, name: &str| {
            let found = rows.iter().filter(of).find(|row| row["m"] == m.to_string());
            found.and_then(|row| row.get(name)).copied().unwrap_or_default().to_owned()
        };
        write!(out, "| ({n}, {k}) | {format}, {x} |").ok()?;
        numbers.iter().for_each(|m| out += &format!(" {} |", cell(m, "median_us")));
        out.push('\n');
        if numbers.iter().any(|m| !cell(m, "baseline_us").is_empty()) && format.starts_with("w4") {
            write!(out, "| | dense, cuBLASLt |").ok()?;
            numbers.iter().for_each(|m| out += &format!(" {} |", cell(m, "baseline_us")));
            out.push('\n');
        }
    }
    Some(out)
}

/// A line for each layer and format, with all that was timed beside it.
fn convolutions(rows: &[Row<'_>]) -> Option<String> {
    let times = ["median_us", "qlinear_conv_us", "qlinear_conv_nhwc_us", "conv_us"];
    let times: Vec<&str> =
        times.into_iter().filter(|name| rows.first().is_some_and(|row| row.contains_key(name))).collect();
    let mut out = String::from("| format | kernel size, stride | channels | image, batch | kernel |");
    times.iter().for_each(|name| out += &format!(" {name} |"));
    out += &format!("\n|---|---|---|---|---|{}\n", "--:|".repeat(times.len()));
    for row in rows {
        let get = |name: &str| row.get(name).copied().unwrap_or_default();
        let [format, size, stride, ci, co] = ["format", "kernel_size", "stride", "ci", "co"].map(get);
        let [image, batch, kernel] = ["size", "batch", "kernel"].map(get);
        write!(out, "| {format} | {size}, {stride} | {ci} to {co} | {image}, {batch} | {kernel} |").ok()?;
        times.iter().for_each(|name| out += &format!(" {} |", get(name)));
        out.push('\n');
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tables_are_those_of_the_records() {
        let root = super::root().unwrap();
        let found = std::fs::read_to_string(root.join(super::FILE)).unwrap();
        assert!(found == super::text(&root).unwrap(), "run `cargo xtask bench-results`");
    }
}
