//! What looks wrong in a checkpoint but does not stop it from being read.

use serde::Serialize;

/// Findings of one kind that are told.
const MOST_TOLD: usize = 20;

/// Something in a checkpoint that is not as its labels say, and how it was read all the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The module, tensor or file that it is about.
    pub subject: String,
    /// One sentence: what was found, and which reading was taken.
    pub text: String,
}

impl Finding {
    pub(crate) fn new(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { subject: subject.into(), text: text.into() }
    }

    /// The first of many findings of one kind, and how many more there are.
    pub fn shortened(mut findings: Vec<Self>) -> Vec<Self> {
        let more = findings.len().saturating_sub(MOST_TOLD);
        if more > 0 {
            findings.truncate(MOST_TOLD);
            findings.push(Self::new("the checkpoint", format!("has {more} more findings of this kind")));
        }
        findings
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.subject, self.text)
    }
}
