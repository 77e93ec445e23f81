//! `cargo xtask plots`: the records in bench/record and bench/perplexity as pictures in docs/plots, and docs/plots.md, which shows them.
//!
//! Of a record of products the largest weight is drawn: time against the number of rows of x, each format beside the limit that the
//! record has for it and beside dense products, where they were timed. Of convolutions beside other software a bar for each. Nothing
//! else is in these files, so that a test can make them anew and compare.

mod svg;

use crate::bench_results::{Row, read_rows, sorted};
use crate::c_header::root;
use std::fmt::Write;
use std::path::Path;
use svg::{Bars, Chart, Mark, Scale, Series};

#[derive(clap::Args)]
pub struct Args {}

const PAGE: &str = "docs/plots.md";
const FOLDER: &str = "docs/plots";

const HEAD: &str = "# Plots\n\nMade by `cargo xtask plots` from the records in `bench/record` and `bench/perplexity`; each line under a picture is \
the record's own. `bench/RESULTS.md` has the numbers. Of each record of products the largest weight is drawn. Dashed: what reading the \
weights, or computing, takes at least, at the speeds that were measured in the same run.\n";

/// A picture, and what stands under it.
struct Plot {
    name: String,
    title: String,
    notes: Vec<String>,
    svg: String,
}

pub fn run(_: &Args) -> Result<(), String> {
    let root = root()?;
    let folder = root.join(FOLDER);
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let plots = plots(&root)?;
    for old in sorted(&folder)? {
        std::fs::remove_file(&old).map_err(|e| format!("{}: {e}", old.display()))?;
    }
    let files = plots.iter().map(|plot| (folder.join(&plot.name), plot.svg.clone()));
    for (path, text) in files.chain([(root.join(PAGE), page(&plots))]) {
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

/// All pictures, in the order of the page.
fn plots(root: &Path) -> Result<Vec<Plot>, String> {
    let mut plots = Vec::new();
    for file in sorted(&root.join("bench/perplexity"))? {
        let (name, text) = read(&file)?;
        for of_four in [false, true] {
            let plot = perplexity(&name, &text, of_four);
            plots.push(plot.ok_or_else(|| format!("{}: expected a record", file.display()))?);
        }
    }
    for machine in sorted(&root.join("bench/record"))? {
        let of = machine.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for file in sorted(&machine)? {
            let (name, text) = read(&file)?;
            let rows = read_rows(&text).ok_or_else(|| format!("{}: expected a record", file.display()))?;
            let named = format!("{of}-{name}");
            plots.extend(if rows.first().is_some_and(|row| row.contains_key("m")) {
                products(&named, &text, &rows)
            } else {
                convolutions(&named, &text, &rows)
            });
        }
    }
    Ok(plots)
}

fn read(file: &Path) -> Result<(String, String), String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok((file.file_stem().unwrap_or_default().to_string_lossy().into_owned(), text))
}

/// The lines above a record.
fn notes(record: &str) -> Vec<String> {
    record.lines().filter_map(|line| line.strip_prefix("# ")).map(str::to_owned).collect()
}

fn page(plots: &[Plot]) -> String {
    let mut out = HEAD.to_owned();
    for Plot { name, title, notes, .. } in plots {
        write!(out, "\n## {title}\n\n![{title}](plots/{name})\n\n").expect("texts grow");
        notes.iter().for_each(|note| out += &format!("* {note}\n"));
    }
    out
}

/// Time against the number of rows. None: a row has no numbers.
fn products(name: &str, record: &str, rows: &[Row<'_>]) -> Option<Plot> {
    let number = |row: &Row<'_>, name: &str| row.get(name)?.parse::<f64>().ok();
    let size = |row: &Row<'_>| Some(number(row, "n")? * number(row, "k")?);
    let most = rows.iter().filter_map(size).reduce(f64::max)?;
    let rows: Vec<&Row<'_>> = rows.iter().filter(|row| size(row) == Some(most)).collect();
    let first = rows.first()?;
    // Of two shapes of one size the first.
    let rows: Vec<&Row<'_>> = rows.iter().copied().filter(|row| row["n"] == first["n"]).collect();
    let mut formats: Vec<&str> = Vec::new();
    for row in &rows {
        if !formats.contains(&row["format"]) {
            formats.push(row["format"]);
        }
    }
    let of = |format: &str| rows.iter().copied().filter(|row| row["format"] == format).collect::<Vec<_>>();
    let line = |rows: &[&Row<'_>], time: &dyn Fn(&Row<'_>) -> Option<f64>| -> Vec<[f64; 2]> {
        rows.iter().filter_map(|row| Some([number(row, "m")?, time(row)?])).collect()
    };
    let limit = |row: &Row<'_>| {
        number(row, "limit_us").or_else(|| Some(number(row, "median_us")? * number(row, "roofline_percent")? / 100.0))
    };
    let mut series = Vec::new();
    for (colour, format) in formats.iter().enumerate() {
        let rows = of(format);
        let x = rows.first()?["x"];
        series.push(Series::new(
            format!("{format}, x {x}"),
            colour,
            Mark::Line,
            line(&rows, &|row| number(row, "median_us")),
        ));
        series.push(Series::new(String::new(), colour, Mark::Dashed, line(&rows, &limit)));
    }
    let dense = line(&of(formats.first()?), &|row| number(row, "baseline_us"));
    if !dense.is_empty() {
        series.push(Series::new("dense fp16, cuBLASLt".to_owned(), svg::BLACK, Mark::Line, dense));
    }
    let (notes, [n, k]) = (notes(record), [first["n"], first["k"]]);
    let machine = notes.first()?.split_once(", ")?.1.to_owned();
    let title = format!("Products of ({n}, {k}) on {machine}: {}", formats.join(", "));
    let chart = Chart {
        title: format!("{n} × {k} weights, {machine}"),
        x: Scale::log("rows of x (m)", series.iter().flat_map(|s| s.points.iter().map(|p| p[0])).collect()),
        y: Scale::decades("time, µs"),
        series,
    };
    Some(Plot { name: format!("{name}.svg"), title, notes, svg: chart.draw() })
}

/// A bar for each layer and each software. None: no other software was timed beside it.
fn convolutions(name: &str, record: &str, rows: &[Row<'_>]) -> Option<Plot> {
    let columns = [
        ("median_us", "halfbyte, int8"),
        ("qlinear_conv_nhwc_us", "onnxruntime, QLinearConv, NHWC"),
        ("qlinear_conv_us", "onnxruntime, QLinearConv"),
        ("conv_us", "onnxruntime, Conv in f32"),
    ];
    let columns: Vec<(&str, &str)> =
        columns.into_iter().filter(|(name, _)| rows.iter().all(|row| row.contains_key(name))).collect();
    if columns.len() < 2 {
        return None;
    }
    let label = |row: &Row<'_>| {
        let depthwise = if row["groups"] == "1" { "" } else { ", depthwise" };
        format!("{}, {} to {}, {}{depthwise}", row["kernel_size"], row["ci"], row["co"], row["size"])
    };
    let times = |row: &Row<'_>| columns.iter().map(|(name, _)| row[name].parse().ok()).collect::<Option<Vec<f64>>>();
    let groups = rows.iter().map(|row| Some((label(row), times(row)?))).collect::<Option<Vec<_>>>()?;
    let notes = notes(record);
    let machine = notes.first()?.split_once(", ")?.1.to_owned();
    let bars = Bars {
        title: format!("Convolutions of ResNet-50, batch {}, {machine}", rows.first()?["batch"]),
        unit: "µs",
        names: columns.iter().map(|(_, name)| (*name).to_owned()).collect(),
        groups,
    };
    Some(Plot { name: format!("{name}.svg"), title: bars.title.clone(), notes, svg: bars.draw() })
}

/// Bits that a weight takes with its share of scales and zero points, of the layers of `models/stdlib-11m`.
fn bits_a_weight(bits: f64, group: &str, zero: &str) -> Option<f64> {
    // Its layers have 3,456 rows and 1,572,864 weights in each block.
    let group = if group == "channel" { 1_572_864.0 / 3_456.0 } else { group.parse().ok()? };
    let zeros = if zero == "asym" { bits } else { 0.0 };
    Some(bits + (16.0 + zeros) / group)
}

/// Perplexity against bits a weight, of all or of 4 bits alone. None: a row has no numbers.
fn perplexity(name: &str, record: &str, of_four: bool) -> Option<Plot> {
    let rows = read_rows(record)?;
    let number = |row: &Row<'_>, name: &str| row.get(name)?.parse::<f64>().ok();
    let mut series: Vec<Series> = Vec::new();
    let mut dense = None;
    for row in &rows {
        let (method, value) = (row["method"], number(row, "perplexity")?);
        if method == "dense" {
            dense = Some(value);
            continue;
        }
        if of_four && row["bits"] != "4" {
            continue;
        }
        let point = [bits_a_weight(number(row, "bits")?, row["group"], row["zero"])?, value];
        match series.iter_mut().find(|series| series.name == method) {
            Some(series) => series.points.push(point),
            None => series.push(Series::new(method.to_owned(), series.len(), Mark::Points, vec![point])),
        }
    }
    let x = "bits a weight, scales and zero points counted";
    let (suffix, ends, x, y) = if of_four {
        let x = Scale::linear(x, vec![4.0, 4.1, 4.2, 4.3, 4.4, 4.5, 4.6, 4.7]);
        (", 4 bits", [4.0, 4.7], x, Scale::linear("perplexity", vec![5.25, 5.3, 5.35, 5.4, 5.45, 5.5, 5.55, 5.6, 5.65]))
    } else {
        let x = Scale::linear(x, vec![2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        ("", [1.8, 8.4], x, Scale::log("perplexity", vec![5.25, 5.5, 6.0, 7.0, 8.0, 10.0, 12.5]))
    };
    if let Some(value) = dense {
        let line = ends.map(|bits| [bits, value]).to_vec();
        series.push(Series::new(format!("fp16: {value}"), svg::BLACK, Mark::Dashed, line));
    }
    let title = format!("Perplexity of {name} against bits a weight{suffix}");
    let chart = Chart { title: title.clone(), x, y, series };
    let name = format!("perplexity-{name}{}.svg", if of_four { "-4-bits" } else { "" });
    Some(Plot { name, title, notes: notes(record), svg: chart.draw() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pictures_are_those_of_the_records() {
        let root = root().unwrap();
        let plots = plots(&root).unwrap();
        assert!(plots.len() > 5, "{} plots", plots.len());
        let again = "run `cargo xtask plots`";
        assert!(std::fs::read_to_string(root.join(PAGE)).unwrap() == page(&plots), "{again}");
        for plot in &plots {
            let found = std::fs::read_to_string(root.join(FOLDER).join(&plot.name)).unwrap();
            assert!(found == plot.svg, "{}: {again}", plot.name);
        }
        assert_eq!(sorted(&root.join(FOLDER)).unwrap().len(), plots.len(), "{again}");
    }

    /// What is drawn is what docs/calibration.md says was measured.
    #[test]
    fn perplexities_are_those_of_the_documents() {
        let root = root().unwrap();
        let (_, record) = read(&root.join("bench/perplexity/stdlib-11m.csv")).unwrap();
        let told = std::fs::read_to_string(root.join("docs/calibration.md")).unwrap();
        for row in read_rows(&record).unwrap() {
            assert!(told.contains(row["perplexity"]), "{row:?}");
        }
        assert_eq!(bits_a_weight(4.0, "128", "asym"), Some(4.15625));
    }
}
