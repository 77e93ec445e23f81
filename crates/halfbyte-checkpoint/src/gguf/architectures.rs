//! The architectures that are translated between GGUF's terms and those of Hugging Face's `config.json`.

use super::header::Header;
use crate::error::Result;

/// An architecture in both terms.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// Its name in `general.architecture`, with which the keys of its metadata begin.
    pub gguf: &'static str,
    /// Its name in `architectures` of a config.
    pub architecture: &'static str,
    /// Its name in `model_type` of a config.
    pub model_type: &'static str,
    /// Whether GGUF has the rows of q and k in pairs, see [`super::hf_row`].
    pub paired_rows: bool,
    /// Whether the config says if q, k, v and o have biases.
    pub attention_bias: bool,
    /// Whether the config says if gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether every layer has a sliding window.
    pub window: bool,
}

const LLAMA: Architecture = Architecture {
    gguf: "llama",
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    paired_rows: true,
    attention_bias: true,
    mlp_bias: true,
    window: false,
};

const QWEN2: Architecture = Architecture {
    gguf: "qwen2",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    paired_rows: false,
    attention_bias: false,
    mlp_bias: false,
    window: false,
};

/// Every architecture that is translated. In GGUF Mistral is a Llama with a window.
static ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture {
        architecture: "MistralForCausalLM",
        model_type: "mistral",
        attention_bias: false,
        mlp_bias: false,
        window: true,
        ..LLAMA
    },
    QWEN2,
    Architecture {
        gguf: "qwen3",
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        attention_bias: true,
        ..QWEN2
    },
];

/// Key of the positions that a query sees, behind the architecture's name.
pub(super) const WINDOW: &str = "attention.sliding_window";

impl Architecture {
    /// That of a file; None: one that is not translated.
    pub fn of_file(header: &Header) -> Result<Option<&'static Self>> {
        let Some(name) = header.text("general.architecture")? else { return Ok(None) };
        let window = header.number(&format!("{name}.{WINDOW}"))?.is_some_and(|window| window > 0);
        let named = || ARCHITECTURES.iter().filter(|known| known.gguf == name);
        Ok(named().find(|known| known.window == window).or_else(|| named().next()))
    }

    /// That of a config's `model_type`; None: one that is not translated.
    pub fn of_config(model_type: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|known| known.model_type == model_type)
    }

    /// A key of its metadata.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.gguf)
    }
}

/// Names in quotes, for errors: those that `name` gives of each.
pub(super) fn all(name: impl Fn(&Architecture) -> &'static str) -> String {
    let mut names: Vec<String> = ARCHITECTURES.iter().map(|known| format!("\"{}\"", name(known))).collect();
    names.dedup();
    names.join(", ")
}
