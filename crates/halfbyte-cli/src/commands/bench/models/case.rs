//! Case files of a model: in which formats and on how many GPUs it is timed, and what others have published of it.

use crate::failure::{Exit, Failure, Result};
use halfbyte::Format;
use halfbyte_llm::Config;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Ranks that share a model, at most.
const MOST_GPUS: u16 = 64;

/// A case file, as TOML:
///
/// ```toml
/// origin = "where model and numbers come from"
/// config = "bloom-176b.json"
/// prompt = 512
/// generate = 32
/// batch = [16]
///
/// [[row]]
/// format = "w4a16-g128"
/// gpus = 2
///
/// [[published]]
/// what = "fp16"
/// gpus = 8
/// machine = "A100 80 GB"
/// tokens_per_second = 22.7
/// source = "where that is written"
/// ```
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Where model and numbers come from.
    pub origin: String,
    /// A configuration for random weights; in the file its path from the file's folder on.
    pub config: PathBuf,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens to write.
    pub generate: usize,
    /// Numbers of texts that are written at once too.
    #[serde(default)]
    pub batch: Vec<u16>,
    /// What is timed.
    #[serde(rename = "row", default)]
    pub rows: Vec<Row>,
    /// What stands beside it.
    #[serde(default)]
    pub published: Vec<Published>,
}

/// A way to run the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Format of the blocks' layers; none: floats in f16.
    pub format: Option<String>,
    /// GPUs that share the model.
    pub gpus: u16,
}

impl Row {
    /// The format's name.
    pub fn name(&self) -> &str {
        self.format.as_deref().unwrap_or("f16")
    }
}

/// What others have measured.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The format, in their words.
    pub what: String,
    /// GPUs that share the model.
    pub gpus: u16,
    /// What kind they are.
    pub machine: String,
    /// Of one text.
    pub tokens_per_second: f64,
    /// Who has published it, and where.
    pub source: String,
}

impl Case {
    /// Reads a case file. Errors: no such file, no TOML of this form, nothing to measure, a format that does not exist, a configuration
    /// that is not there or cannot run.
    pub fn read(path: &Path) -> Result<Self> {
        let refuse = |cause: &str| {
            Failure::new(
                Exit::Input,
                format!("{} is not a case file of a model", path.display()),
                cause,
                "bench/cases/bloom-models.toml shows the form",
            )
        };
        let text = crate::text::read_text(path)?;
        let mut case: Self = toml::from_str(&text).map_err(|e| refuse(&crate::text::toml_cause(&text, &e)))?;
        if case.rows.is_empty() {
            return Err(refuse("expected at least one [[row]]"));
        }
        if case.prompt == 0 || case.generate == 0 || case.batch.contains(&0) {
            return Err(refuse("expected prompt, generate and each number of batch to be at least 1"));
        }
        for Row { format, gpus } in &case.rows {
            if !(1..=MOST_GPUS).contains(gpus) {
                return Err(refuse(&format!("expected gpus from 1 to {MOST_GPUS}, got {gpus}")));
            }
            if let Some(format) = format {
                format.parse::<Format>().map_err(|e| refuse(&e.to_string()))?;
            }
        }
        let odd =
            |row: &&Published| row.gpus == 0 || !row.tokens_per_second.is_finite() || row.tokens_per_second <= 0.0;
        if let Some(odd) = case.published.iter().find(odd) {
            return Err(refuse(&format!("expected gpus and tokens_per_second above 0 of \"{}\"", odd.what)));
        }
        case.config = path.parent().unwrap_or(Path::new("")).join(&case.config);
        Config::parse(&crate::text::read_text(&case.config)?, &case.config)?;
        Ok(case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;

    const HEAD: &str = "origin = 'a test'\nconfig = 'tiny.json'\nprompt = 8\ngenerate = 4\n";

    /// The case of a text beside a configuration, or the failure's words.
    fn read(text: &str) -> std::result::Result<Case, String> {
        let here = tempfile::tempdir().unwrap();
        std::fs::write(here.path().join("tiny.json"), CONFIG).unwrap();
        let path = here.path().join("case.toml");
        std::fs::write(&path, text).unwrap();
        Case::read(&path).map_err(|failure| format!("{failure:?}"))
    }

    #[test]
    fn a_case_is_read() {
        let rows = "batch = [2, 4]\n[[row]]\ngpus = 4\n[[row]]\nformat = 'w4a16-g32'\ngpus = 1\n";
        let published =
            "[[published]]\nwhat = 'fp16'\ngpus = 8\nmachine = 'A100'\ntokens_per_second = 22.7\nsource = 'a page'\n";
        let case = read(&format!("{HEAD}{rows}{published}")).unwrap();
        assert_eq!((case.prompt, case.generate, case.batch.as_slice()), (8, 4, &[2, 4][..]));
        assert!(case.config.is_absolute() && case.config.ends_with("tiny.json"));
        let rows: Vec<_> = case.rows.iter().map(|row| (row.name(), row.gpus)).collect();
        assert_eq!(rows, [("f16", 4), ("w4a16-g32", 1)]);
        assert_eq!((case.published.len(), case.published[0].tokens_per_second), (1, 22.7));
        let least = read(&format!("{HEAD}[[row]]\ngpus = 1\n")).unwrap();
        assert!(least.batch.is_empty() && least.published.is_empty());
    }

    #[test]
    fn what_is_no_case_is_refused() {
        let row = "[[row]]\ngpus = 1\n";
        let published = "[[published]]\nwhat = 'x'\ngpus = 1\nmachine = ''\nsource = ''\ntokens_per_second = nan\n";
        for (text, word) in [
            (format!("{HEAD}colour = 'red'\n{row}"), "unknown field `colour`"),
            (format!("{HEAD}{row}cpus = 1\n"), "unknown field `cpus`"),
            (HEAD.to_owned(), "at least one [[row]]"),
            (format!("{HEAD}[[row]]\ngpus = 0\n"), "gpus from 1 to 64, got 0"),
            (format!("{HEAD}[[row]]\ngpus = 65\n"), "gpus from 1 to 64, got 65"),
            (format!("{HEAD}{row}format = 'w9a9'\n"), "w9a9"),
            (format!("{HEAD}batch = [0]\n{row}"), "at least 1"),
            (format!("{HEAD}{row}").replace("prompt = 8", "prompt = 0"), "at least 1"),
            (format!("{HEAD}{row}{published}"), "tokens_per_second above 0"),
            (format!("{HEAD}{row}").replace("tiny", "none"), "none.json"),
        ] {
            let failure = read(&text).unwrap_err();
            assert!(failure.contains(word) && failure.contains("exit: Input"), "{word}: {failure}");
        }
    }

    #[test]
    fn the_case_that_ships_is_one() {
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/cases");
        let case = Case::read(&cases.join("bloom-models.toml")).unwrap();
        assert!(case.rows.len() >= 6 && !case.published.is_empty());
    }
}
