//! What of a spec has steps on a GPU. All of a spec is taken apart here, so that what is added to it must be said.

use super::OP;
use crate::arch::Spec;
use crate::arch::spec::{
    AttentionSpec, FeedForward, LayerSpec, MlpKind, MlpSpec, NormKind, NormSpec, Positions, Residual,
};
use crate::error::{Error, Result};
use halfbyte::kernel::Activation;

/// Error: a model that has no steps on a GPU yet, with what it is that has none.
pub(super) fn check(spec: &Spec) -> Result<()> {
    let Spec {
        vocab: _,
        hidden: _,
        heads: _,
        max_context: _,
        embedding: _,
        embedding_scale,
        embedding_norm,
        layers,
        norm,
        head: _,
        logit_cap,
    } = spec;
    if embedding_norm.is_some() {
        return refuse("an embedding as it is", "a norm over it");
    }
    if embedding_scale.is_some() {
        return refuse("an embedding as it is", "a factor of it");
    }
    if logit_cap.is_some() {
        return refuse("logits as they are", "a cap of them");
    }
    check_norm(norm)?;
    layers.iter().try_for_each(check_layer)
}

fn check_layer(layer: &LayerSpec) -> Result<()> {
    let LayerSpec { attention, mlp, residual } = layer;
    check_attention(attention)?;
    let MlpSpec { norm, kind, post_norm } = mlp;
    norm.iter().try_for_each(check_norm)?;
    if post_norm.is_some() {
        return refuse("norms before attention and MLP", "norms over what they add");
    }
    if *residual != Residual::Sequential {
        return refuse("an MLP that reads what attention adds", "one beside attention");
    }
    let mlp = match kind {
        MlpKind::Experts(_) => return refuse("one MLP for all tokens", "a mixture of experts"),
        MlpKind::Dense(mlp) => mlp,
    };
    let FeedForward { up: _, down: _, activation, clamp } = mlp;
    if clamp.is_some() {
        return refuse("an MLP gated by SiLU", "a clamped gate");
    }
    if !mlp.is_gated() || *activation != Activation::Silu {
        return refuse("an MLP gated by SiLU", "another activation");
    }
    Ok(())
}

fn check_attention(attention: &AttentionSpec) -> Result<()> {
    let AttentionSpec { norm, qkv: _, head_norms: _, positions, window: _, scale: _, cap, sinks, output: _, post_norm } =
        attention;
    check_norm(norm)?;
    match positions {
        Positions::Rope(_) | Positions::None => {}
        Positions::Alibi => return refuse("rotary positions or none", "ALiBi"),
    }
    if cap.is_some() {
        return refuse("scores as they are", "a cap of them");
    }
    if sinks.is_some() {
        return refuse("a softmax over positions alone", "attention sinks");
    }
    if post_norm.is_some() {
        return refuse("norms before attention and MLP", "norms over what they add");
    }
    Ok(())
}

fn check_norm(norm: &NormSpec) -> Result<()> {
    // What is added to a weight is added when it is loaded.
    let NormSpec { name: _, kind, eps: _, offset: _ } = norm;
    match kind {
        NormKind::Rms => Ok(()),
        NormKind::Layer => refuse("RMS norms", "a LayerNorm"),
    }
}

fn refuse(expected: &str, got: &str) -> Result<()> {
    Err(Error::invalid(OP, expected, got))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use std::path::Path;

    /// Of every architecture: what a GPU runs, and by what name it refuses the others.
    #[test]
    fn a_gpu_runs_what_it_can_and_names_what_it_cannot() {
        let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/architectures");
        let refused = [
            ("bloom", "a norm over it"),
            ("gemma2", "a factor of it"),
            ("gemma3", "a factor of it"),
            ("gpt-neox", "a LayerNorm"),
            ("gpt-oss", "attention sinks"),
            ("mixtral", "a mixture of experts"),
            ("qwen3-moe", "a mixture of experts"),
        ];
        let mut count = 0;
        for entry in std::fs::read_dir(&all).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let checked = check(&Config::from_folder(&path).unwrap().spec).map_err(|e| e.to_string());
            match refused.iter().find(|(of, _)| *of == name) {
                None => assert_eq!(checked, Ok(()), "{name}"),
                Some((_, why)) => assert!(checked.unwrap_err().ends_with(why), "{name}"),
            }
            count += 1;
        }
        assert!(count >= 14);
    }

    /// Each property on its own, in a model that runs without it.
    #[test]
    fn each_property_is_refused_by_its_name() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/architectures/llama");
        let runs = Config::from_folder(&folder).unwrap().spec;
        let norm = runs.norm.clone();
        let of = |change: &dyn Fn(&mut Spec)| {
            let mut spec = runs.clone();
            change(&mut spec);
            check(&spec).map_err(|e| e.to_string()).expect_err("refused")
        };
        let of_mlp = |change: &dyn Fn(&mut FeedForward)| {
            of(&|spec| {
                if let MlpKind::Dense(mlp) = &mut spec.layers[1].mlp.kind {
                    change(mlp);
                }
            })
        };
        let clamp = crate::arch::spec::GateClamp { alpha: 1.0, limit: 1.0 };
        for (text, why) in [
            (of(&|spec| spec.logit_cap = Some(1.0)), "a cap of them"),
            (of(&|spec| spec.layers[1].attention.cap = Some(1.0)), "a cap of them"),
            (of(&|spec| spec.layers[1].attention.positions = Positions::Alibi), "ALiBi"),
            (of(&|spec| spec.layers[1].attention.norm.kind = NormKind::Layer), "a LayerNorm"),
            (of(&|spec| spec.norm.kind = NormKind::Layer), "a LayerNorm"),
            (of(&|spec| spec.layers[1].attention.post_norm = Some(norm.clone())), "norms over what they add"),
            (of(&|spec| spec.layers[1].mlp.post_norm = Some(norm.clone())), "norms over what they add"),
            (of(&|spec| spec.layers[1].residual = Residual::Parallel), "one beside attention"),
            (of_mlp(&|mlp| mlp.clamp = Some(clamp)), "a clamped gate"),
            (of_mlp(&|mlp| mlp.activation = Activation::Gelu), "another activation"),
            (of_mlp(&|mlp| drop(mlp.up.pop())), "another activation"),
        ] {
            assert!(text.ends_with(why), "{text}");
        }
    }
}
