//! The records of `halfbyte bench models`: a line for each format and number of GPUs, then one for each that others have published.

use crate::bench_record::text;
use crate::bench_results::Row;
use serde_json::{Value, json};
use std::fmt::Write;

/// Columns before those of many texts at once, and after them.
const COLUMNS: [&str; 7] =
    ["format", "gpus", "weights_gb", "memory_gb", "decode_tokens_per_s", "decode_percent", "prefill_tokens_per_s"];
const LAST: [&str; 3] = ["error", "machine", "source"];

/// What the first row that was measured says of its machine, in the form of other reports. None: none was.
pub fn machine(report: &Value) -> Option<Value> {
    let first = report["rows"].as_array()?.iter().map(|row| &row["report"]).find(|report| report.is_object())?;
    // `cuda:0 (NVIDIA H200), activations f16`; of a CPU `cpu`.
    let device = first["device"].as_str()?.split_once(" (").and_then(|(_, rest)| Some(rest.rsplit_once("), ")?.0));
    Some(json!({"device": device, "driver": first["driver"], "threads": first["threads"], "isa": first["isa"]}))
}

/// The lines of a record under its comments. Error: a report of another form.
pub fn record(report: &Value) -> Result<String, String> {
    let array = |name: &str| report[name].as_array().ok_or_else(|| format!("the report has no {name}"));
    let batch = array("batch")?;
    let of_texts = batch.iter().map(|texts| format!("{texts}_texts_tokens_per_s"));
    let names = COLUMNS.map(str::to_owned).into_iter().chain(of_texts).chain(LAST.map(str::to_owned));
    let mut lines = vec![names.collect::<Vec<_>>()];
    let times = |value: &Value, factor: f64| value.as_f64().map_or(Value::Null, |value| Value::from(value * factor));
    for row in array("rows")? {
        let of = &row["report"];
        let mut cells = vec![
            row["format"].clone(),
            row["gpus"].clone(),
            times(&of["weight_bytes"], 1e-9),
            times(&of["device_memory_bytes"], 1e-9),
            of["decode_tokens_per_second"].clone(),
            times(&of["limits"]["decode_share"], 100.0),
            of["prefill_tokens_per_second"].clone(),
        ];
        let batches = of["batches"].as_array().map_or(&[][..], Vec::as_slice);
        let speed = |texts: &Value| {
            batches.iter().find(|found| found["texts"] == *texts).map(|found| &found["tokens_per_second"])
        };
        cells.extend(batch.iter().map(|texts| speed(texts).cloned().unwrap_or_default()));
        cells.extend([row["error"].clone(), Value::Null, Value::Null]);
        lines.push(cells.iter().map(cell).collect());
    }
    for row in array("published")? {
        let mut cells = vec![Value::Null; COLUMNS.len() + batch.len() + LAST.len()];
        let last = cells.len();
        (cells[0], cells[1], cells[4]) = (row["what"].clone(), row["gpus"].clone(), row["tokens_per_second"].clone());
        (cells[last - 2], cells[last - 1]) = (row["machine"].clone(), row["source"].clone());
        lines.push(cells.iter().map(cell).collect());
    }
    Ok(lines.iter().map(|cells| cells.join(",") + "\n").collect())
}

/// A cell, in which nothing ends it.
fn cell(value: &Value) -> String {
    text(value).replace(',', ";").replace(['\n', '\r', '|'], " ")
}

/// A line for each format and number of GPUs; below them what others have published.
pub fn table(rows: &[Row<'_>]) -> Option<String> {
    let get = |row: &Row<'_>, name: &str| row.get(name).copied().unwrap_or_default().to_owned();
    let mut texts: Vec<&str> =
        rows.first()?.keys().filter_map(|name| name.strip_suffix("_texts_tokens_per_s")).collect();
    texts.sort_by_key(|texts| texts.parse::<usize>().ok());
    let (published, own): (Vec<_>, Vec<_>) = rows.iter().partition(|row| !get(row, "source").is_empty());
    let mut out = String::from(
        "| format | GPUs | weights, memory a GPU (GB) | decode (tok/s) | of limit (%) | prefill (tok/s) |",
    );
    texts.iter().for_each(|texts| out += &format!(" {texts} texts (tok/s) |"));
    out += &format!(" |\n|---|--:|--:|--:|--:|--:|{}---|\n", "--:|".repeat(texts.len()));
    for row in own {
        let [format, gpus, weights, memory, decode, percent, prefill] = COLUMNS.map(|name| get(row, name));
        let bytes = [weights, memory].into_iter().filter(|bytes| !bytes.is_empty()).collect::<Vec<_>>().join(", ");
        write!(out, "| {format} | {gpus} | {bytes} | {decode} | {percent} | {prefill} |").ok()?;
        texts.iter().for_each(|texts| out += &format!(" {} |", get(row, &format!("{texts}_texts_tokens_per_s"))));
        writeln!(out, " {} |", get(row, "error")).ok()?;
    }
    if !published.is_empty() {
        out += "\n| published | GPUs | decode (tok/s) | machine | source |\n|---|--:|--:|---|---|\n";
    }
    for row in published {
        let cells = ["format", "gpus", "decode_tokens_per_s", "machine", "source"].map(|name| get(row, name));
        writeln!(out, "| {} |", cells.join(" | ")).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_results::read_rows;

    #[test]
    fn a_report_becomes_a_record_and_a_table() {
        let measured = json!({
            "device": "cuda:0 (NVIDIA H200), activations f16", "driver": "13.0", "weight_bytes": 48_100_000_000_u64,
            "device_memory_bytes": 53_100_000_000_u64, "decode_tokens_per_second": 64.52, "prefill_tokens_per_second": 2907.4,
            "limits": {"decode_share": 0.812}, "batches": [{"texts": 16, "tokens_per_second": 685.1}],
        });
        let report = json!({
            "batch": [16],
            "rows": [
                {"format": "f16", "gpus": 1, "report": null, "error": "it does not fit: 352 GB, and more, are needed"},
                {"format": "w4a16-g128", "gpus": 2, "report": measured, "error": null},
            ],
            "published": [
                {"what": "fp16", "gpus": 8, "machine": "A100", "tokens_per_second": 22.7, "source": "a page, its first table"},
            ],
        });
        let of = machine(&report).unwrap();
        assert_eq!((&of["device"], &of["driver"]), (&"NVIDIA H200".into(), &"13.0".into()));
        let record = record(&report).unwrap();
        assert!(record.lines().all(|line| line.split(',').count() == 11), "{record}");
        let expected = "\
| format | GPUs | weights, memory a GPU (GB) | decode (tok/s) | of limit (%) | prefill (tok/s) | 16 texts (tok/s) | |
|---|--:|--:|--:|--:|--:|--:|---|
| f16 | 1 |  |  |  |  |  | it does not fit: 352 GB; and more; are needed |
| w4a16-g128 | 2 | 48.1, 53.1 | 64.5 | 81.2 | 2907.4 | 685.1 |  |

| published | GPUs | decode (tok/s) | machine | source |
|---|--:|--:|---|---|
| fp16 | 8 | 22.7 | A100 | a page; its first table |
";
        assert_eq!(table(&read_rows(&record).unwrap()).unwrap(), expected);
    }
}
