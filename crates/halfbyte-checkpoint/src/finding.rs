//! What looks wrong in a checkpoint but does not stop it from being read.

use serde::Serialize;

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
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.subject, self.text)
    }
}
