//! The architectures that are translated between GGUF's terms and those of Hugging Face's `config.json`.

use super::header::Header;
use super::names::{BLOOM, GEMMA, GPT_NEOX, GPT_OSS, LLAMA as LLAMA_NAMES, MIXTRAL, Names, PHI3, QWEN3_MOE};
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
    /// Names of its tensors.
    pub names: &'static Names,
    /// Whether models are written, and not only read.
    pub written: bool,
    /// The order of rows that GGUF has otherwise.
    pub rows: Rows,
    /// Whether the config says if q, k, v (or the layer of all three) and o have biases.
    pub attention_bias: bool,
    /// Whether the config says if gate, up and down have biases.
    pub mlp_bias: bool,
    /// Which layers have a sliding window.
    pub window: Window,
    /// Whether all MLPs are mixtures of experts.
    pub experts: bool,
    /// What of its config no other has.
    pub family: Family,
}

/// The rows that GGUF has in another order than Hugging Face.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// None.
    Alike,
    /// Those of q and k, in pairs, see [`super::hf_row`].
    Paired,
    /// Those of the layer of q, k and v: all of q, then all of k, then all of v, where Hugging Face has them head by head.
    Fused,
}

/// The layers that see a window of positions only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// None; a file that names a window is refused.
    None,
    /// All, where the file names a window.
    All,
    /// All, where the file names a window; another architecture has the files that name none.
    Always,
    /// Those that the architecture says.
    Some,
}

/// Architectures whose configs have fields of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Those of Llama.
    Llama,
    /// Caps of scores and logits.
    Gemma2,
    /// Two kinds of rotary frequencies.
    Gemma3,
    /// Rotary positions in a part of each head.
    Phi3,
    /// No rotary positions.
    Bloom,
    /// Rotary positions in a part of each head; attention and MLP side by side, or not.
    GptNeox,
    /// A window in every other layer; YaRN with bounds that are not rounded.
    GptOss,
}

const LLAMA: Architecture = Architecture {
    gguf: "llama",
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    names: &LLAMA_NAMES,
    written: true,
    rows: Rows::Paired,
    attention_bias: true,
    mlp_bias: true,
    window: Window::None,
    experts: false,
    family: Family::Llama,
};

const QWEN2: Architecture = Architecture {
    gguf: "qwen2",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    rows: Rows::Alike,
    attention_bias: false,
    mlp_bias: false,
    ..LLAMA
};

/// What is read only.
const READ: Architecture = Architecture { written: false, ..QWEN2 };

/// Every architecture that is translated. In GGUF Mistral is a Llama with a window, Mixtral one with experts.
static ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture {
        architecture: "MistralForCausalLM",
        model_type: "mistral",
        attention_bias: false,
        mlp_bias: false,
        window: Window::Always,
        ..LLAMA
    },
    Architecture {
        gguf: "llama",
        architecture: "MixtralForCausalLM",
        model_type: "mixtral",
        names: &MIXTRAL,
        rows: Rows::Paired,
        window: Window::All,
        experts: true,
        ..READ
    },
    QWEN2,
    Architecture {
        gguf: "qwen3",
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        attention_bias: true,
        ..QWEN2
    },
    Architecture {
        gguf: "qwen3moe",
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        names: &QWEN3_MOE,
        attention_bias: true,
        experts: true,
        ..READ
    },
    Architecture {
        gguf: "gemma2",
        architecture: "Gemma2ForCausalLM",
        model_type: "gemma2",
        names: &GEMMA,
        window: Window::Some,
        family: Family::Gemma2,
        ..READ
    },
    Architecture {
        gguf: "gemma3",
        architecture: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        names: &GEMMA,
        window: Window::Some,
        family: Family::Gemma3,
        ..READ
    },
    Architecture {
        gguf: "phi3",
        architecture: "Phi3ForCausalLM",
        model_type: "phi3",
        names: &PHI3,
        window: Window::All,
        family: Family::Phi3,
        ..READ
    },
    Architecture {
        gguf: "bloom",
        architecture: "BloomForCausalLM",
        model_type: "bloom",
        names: &BLOOM,
        rows: Rows::Fused,
        family: Family::Bloom,
        ..READ
    },
    Architecture {
        gguf: "gptneox",
        architecture: "GPTNeoXForCausalLM",
        model_type: "gpt_neox",
        names: &GPT_NEOX,
        rows: Rows::Fused,
        attention_bias: true,
        family: Family::GptNeox,
        ..READ
    },
    Architecture {
        gguf: "gpt-oss",
        architecture: "GptOssForCausalLM",
        model_type: "gpt_oss",
        names: &GPT_OSS,
        attention_bias: true,
        window: Window::Some,
        experts: true,
        family: Family::GptOss,
        ..READ
    },
];

/// Key of the positions that a query sees, behind the architecture's name.
pub(super) const WINDOW: &str = "attention.sliding_window";

impl Architecture {
    /// That of a file; None: one that is not translated.
    pub fn of_file(header: &Header) -> Result<Option<&'static Self>> {
        let Some(name) = header.text("general.architecture")? else { return Ok(None) };
        let above_0 = |key: &str| Ok(header.number(&format!("{name}.{key}"))?.is_some_and(|number| number > 0));
        let (window, experts): (bool, bool) = (above_0(WINDOW)?, above_0("expert_count")?);
        let named = || ARCHITECTURES.iter().filter(|known| known.gguf == name);
        let fits = |known: &&Self| known.experts == experts && (known.window == Window::Always) == window;
        let found = named().find(fits).or_else(|| named().find(|known| known.experts == experts));
        Ok(found.or_else(|| named().next()))
    }

    /// That of a config's `model_type`; None: one that is not written.
    pub fn of_config(model_type: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|known| known.written && known.model_type == model_type)
    }

    /// A key of its metadata.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.gguf)
    }
}

/// Names in quotes, for errors: those in GGUF of all that are read.
pub(super) fn read() -> String {
    quoted(ARCHITECTURES.iter().map(|known| known.gguf))
}

/// The same in configs, of all that are written.
pub(super) fn written() -> String {
    quoted(ARCHITECTURES.iter().filter(|known| known.written).map(|known| known.model_type))
}

fn quoted(names: impl Iterator<Item = &'static str>) -> String {
    let mut names: Vec<String> = names.map(|name| format!("\"{name}\"")).collect();
    names.dedup();
    names.join(", ")
}
