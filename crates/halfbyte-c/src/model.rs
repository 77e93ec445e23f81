//! Language models: text from a prompt, a piece at a time.

use crate::device::{Device, halfbyte_device};
use crate::handle::{Out, given, null};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::text::text;
use crate::weight::{act, format_of};
use ::halfbyte_checkpoint::{Weights, linears};
use halfbyte::quantize::Rtn;
use halfbyte::{Act, Cpu, Float};
use halfbyte_llm::device::{Device as ModelDevice, Gpu};
use halfbyte_llm::{Config, Finish, LoadOptions, Model, Request, Sampling, Session, Tokenizer};
use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A language model with its tokenizer, on a device.
#[derive(Debug)]
pub struct halfbyte_model {
    model: Model,
    tokenizer: Tokenizer,
    cpu: Arc<Cpu>,
}

/// Loads a folder in Hugging Face's form (config.json, tokenizer.json and safetensors) or a GGUF file onto a device. `quantize`: null to
/// take the weights as they are stored; a format, as "w4a8-g128", to quantise the dense layers of a model while loading: one that is
/// quantised already is refused. `act`: what becomes of the activations of layers that are quantised in the files, HALFBYTE_ACT_*; where
/// `quantize` is given, its format says so for all. On a GPU the model has streams of its own, and its products read f16; with
/// activations of 32 bits (HALFBYTE_ACT_A32, "w4a32-g128") they read f32.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_model_load(
    device: Option<&halfbyte_device>,
    path: *const c_char,
    quantize: *const c_char,
    act: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_model>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let device = given("device", device)?;
        // SAFETY: null or a string, as the header says.
        let path = unsafe { text("path", path) }?;
        let act = crate::model::act(act)?;
        // SAFETY: as above.
        let format = if quantize.is_null() { None } else { Some(unsafe { format_of(quantize) }?) };
        let act = format.map_or(act, |format| format.act);
        let (cpu, device) = match &device.0 {
            Device::Cpu(cpu) => (cpu.clone(), ModelDevice::Cpu),
            Device::Cuda(cuda) => {
                let gpu = Gpu { gpu: cuda.gpu().clone(), activations: activations(act), fused: true, persistent: true };
                // It has nothing to compute.
                (Arc::new(Cpu::new(1)?), ModelDevice::Cuda(gpu))
            }
        };
        let weights = Weights::open(path)?;
        if let Some(format) = format
            && linears(&weights)?.iter().any(|linear| linear.source.is_some())
        {
            let expected = "null for a model that is quantised already";
            return Err(Failure::invalid("quantize", expected, format.to_string()));
        }
        let tokenizer = Tokenizer::from_weights(&weights)?;
        let options = LoadOptions {
            device,
            act,
            quantize: format.map(|format| (format.weight, Rtn::default())),
            ..LoadOptions::default()
        };
        let model = Model::from_weights(Config::from_weights(&weights)?, &weights, &options)?;
        out.give(halfbyte_model { model, tokenizer, cpu })
    })
}

/// What the products of a model read on a GPU.
fn activations(act: Act) -> Float {
    if act == Act::A32 { Float::F32 } else { Float::F16 }
}

/// Tokens that a text may have at most; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_model_context(model: Option<&halfbyte_model>) -> usize {
    model.map_or(0, |model| model.model.config().spec.max_context)
}

/// Bytes that the weights take in memory; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_model_weight_bytes(model: Option<&halfbyte_model>) -> usize {
    model.map_or(0, |model| model.model.weight_bytes())
}

/// What to write, and when to stop. halfbyte_generation_options_default() fills it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct halfbyte_generation_options {
    /// Bytes of this struct, as the program was compiled with: later versions may have more fields, and take this one's too.
    pub struct_size: usize,
    /// At most this many new tokens.
    pub max_tokens: usize,
    /// Logits are divided by this; 0 takes the most likely token.
    pub temperature: f32,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
    pub top_p: f32,
    /// Draw from tokens at least this part as likely as the most likely one; 0 for no limit.
    pub min_p: f32,
    /// Logits of tokens that the text holds are divided by this, or multiplied where they are negative; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time that it was written; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Subtracted from the logits of tokens that were written at all; 0 changes nothing.
    pub presence_penalty: f32,
    /// Draw from this many of the most likely tokens; 0 for no limit.
    pub top_k: usize,
    /// Same seed, same text.
    pub seed: u64,
    /// Texts that end the text, and are not shown, of 1 to 1024 bytes each; null if there are none.
    pub stop: *const *const c_char,
    /// How many.
    pub stop_count: usize,
    /// Other than 0: tokens that end a text do not end this one.
    pub ignore_end: i32,
}

/// Writes the default options to `out`, of which the program has `struct_size` bytes, its `sizeof(halfbyte_generation_options)`: the most
/// likely tokens, 128 at most.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_generation_options_default(
    struct_size: usize,
    out: *mut halfbyte_generation_options,
) -> halfbyte_status {
    guard(|| {
        if out.is_null() {
            return Err(null("out"));
        }
        known_size(struct_size)?;
        // SAFETY: not null, and as many bytes as the caller says.
        unsafe { out.write(halfbyte_generation_options::default()) };
        Ok(())
    })
}

/// Refuses a struct of options of another version.
fn known_size(struct_size: usize) -> Result<()> {
    let expected = size_of::<halfbyte_generation_options>();
    if struct_size == expected {
        return Ok(());
    }
    Err(Failure::invalid("options", format!("struct_size {expected}"), struct_size.to_string()))
}

/// Is told each piece of text as it comes: `text`, `length` bytes of UTF-8 in whole characters with a zero behind them, which stays for
/// the call only. `token`: its number, or -1 for text that was held back until the end; the text may be empty, where a token is a part of
/// a character or may begin a stop text. Returns 0 to go on, anything else to stop. It must not throw, nor jump out.
pub type halfbyte_text_callback =
    Option<extern "C" fn(user_data: *mut c_void, token: i64, text: *const c_char, length: usize) -> i32>;

/// As many tokens as were asked for.
pub const HALFBYTE_FINISH_LENGTH: i32 = 0;
/// The model ended its text.
pub const HALFBYTE_FINISH_END: i32 = 1;
/// A stop text came.
pub const HALFBYTE_FINISH_STOP: i32 = 2;
/// The context is full.
pub const HALFBYTE_FINISH_CONTEXT: i32 = 3;
/// The callback said so.
pub const HALFBYTE_FINISH_CANCELLED: i32 = 4;

/// What was written.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct halfbyte_generation {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// New tokens.
    pub new_tokens: usize,
    /// Why it stopped, HALFBYTE_FINISH_*.
    pub finish: i32,
    /// Time for the prompt.
    pub prefill_seconds: f64,
    /// Time for what followed.
    pub decode_seconds: f64,
}

impl Default for halfbyte_generation_options {
    fn default() -> Self {
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            seed,
        } = Sampling::default();
        Self {
            struct_size: size_of::<Self>(),
            max_tokens: 128,
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            top_k,
            seed,
            stop: std::ptr::null(),
            stop_count: 0,
            ignore_end: 0,
        }
    }
}

impl halfbyte_generation_options {
    /// Those of a program; the default ones of null. Error: a struct of another size, whose first field alone is read then.
    ///
    /// # Safety
    /// `pointer` is null, or as many bytes lie there as the first of its fields says.
    unsafe fn of(pointer: *const Self) -> Result<Self> {
        if pointer.is_null() {
            return Ok(Self::default());
        }
        // SAFETY: every version of the struct begins with its size.
        known_size(unsafe { (&raw const (*pointer).struct_size).read() })?;
        // SAFETY: as many bytes as this version has.
        Ok(unsafe { pointer.read() })
    }

    fn sampling(&self) -> Sampling {
        let Self {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            top_k,
            seed,
            ..
        } = *self;
        Sampling { temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed }
    }

    /// # Safety
    /// `stop` is null, or `stop_count` strings lie there.
    unsafe fn stop(&self) -> Result<Vec<String>> {
        if self.stop_count == 0 {
            return Ok(Vec::new());
        }
        if self.stop.is_null() {
            return Err(Failure::invalid("stop", format!("{} texts", self.stop_count), "null"));
        }
        // SAFETY: not null; the caller vouches for the count and for each string.
        let texts = unsafe { std::slice::from_raw_parts(self.stop, self.stop_count) };
        // SAFETY: as above.
        texts.iter().map(|&stop| Ok(unsafe { text("stop", stop) }?.to_owned())).collect()
    }
}

/// Continues a prompt. `options`: null for the default ones; `callback`: null to be told nothing; `user_data` is handed to it; `result`:
/// null if nobody wants to know. Each call begins a new text; calls from several threads go side by side, as far as the device lets them.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_model_generate(
    model: Option<&halfbyte_model>,
    prompt: *const c_char,
    options: *const halfbyte_generation_options,
    callback: halfbyte_text_callback,
    user_data: *mut c_void,
    result: Option<&mut MaybeUninit<halfbyte_generation>>,
) -> halfbyte_status {
    guard(|| {
        let halfbyte_model { model, tokenizer, cpu } = given("model", model)?;
        // SAFETY: null or a string, as the header says.
        let prompt = unsafe { text("prompt", prompt) }?;
        // SAFETY: null or a struct, as the header says.
        let options = unsafe { halfbyte_generation_options::of(options) }?;
        // SAFETY: as the header says of the field.
        let stop = unsafe { options.stop() }?;
        let config = model.config();
        let limit = config.spec.max_context;
        let ids = tokenizer.encode_prompt_within(prompt, config.bos, limit)?;
        let mut session = Session::new(model, cpu, ids.len().saturating_add(options.max_tokens).min(limit))?;
        let request = Request {
            prompt: &ids,
            max_tokens: options.max_tokens,
            sampling: options.sampling(),
            end_tokens: if options.ignore_end == 0 { &config.eos } else { &[] },
            stop: &stop,
            cancel: None,
        };
        let generated = session.generate_pieces(tokenizer, &request, None, &mut |piece| {
            let Some(callback) = callback else { return ControlFlow::Continue(()) };
            // A model can write a zero byte; the length says how far the text goes.
            let mut bytes = piece.text.as_bytes().to_vec();
            bytes.push(0);
            let token = piece.token.map_or(-1, i64::from);
            match callback(user_data, token, bytes.as_ptr().cast(), bytes.len() - 1) {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            }
        })?;
        if let Some(result) = result {
            result.write(halfbyte_generation {
                prompt_tokens: ids.len(),
                new_tokens: generated.tokens.len(),
                finish: match generated.finish {
                    Finish::Length => HALFBYTE_FINISH_LENGTH,
                    Finish::End => HALFBYTE_FINISH_END,
                    Finish::Stop => HALFBYTE_FINISH_STOP,
                    Finish::Context => HALFBYTE_FINISH_CONTEXT,
                    Finish::Cancelled => HALFBYTE_FINISH_CANCELLED,
                },
                prefill_seconds: generated.prefill.as_secs_f64(),
                decode_seconds: generated.decode.as_secs_f64(),
            });
        }
        Ok(())
    })
}

/// Frees a model; null is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_model_free(model: Option<Box<halfbyte_model>>) {
    guard_quietly((), || drop(model));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_of_32_bits_are_f32_on_a_gpu_too() {
        assert_eq!(activations(Act::A32), Float::F32);
        for act in [Act::A16, Act::A8, Act::A8Asym] {
            assert_eq!(activations(act), Float::F16);
        }
    }
}
