//! Other names for a spec's tensors: those of a model that was saved without its head have no name of the whole in front.

use super::spec::{LayerSpec, MlpKind, NormSpec, Qkv, Spec};

impl Spec {
    /// Gives every module and tensor the name that `rename` makes of its own.
    pub fn rename(&mut self, rename: &impl Fn(&str) -> String) {
        let of = |name: &mut String| *name = rename(name);
        let of_norm = |norm: &mut NormSpec| of(&mut norm.name);
        of(&mut self.embedding);
        self.head.iter_mut().for_each(of);
        self.embedding_norm.iter_mut().for_each(of_norm);
        of_norm(&mut self.norm);
        for LayerSpec { attention, mlp, .. } in &mut self.layers {
            let norms = [&mut attention.post_norm, &mut mlp.norm, &mut mlp.post_norm].into_iter().flatten();
            norms.chain([&mut attention.norm]).chain(attention.head_norms.iter_mut().flatten()).for_each(of_norm);
            match &mut attention.qkv {
                Qkv::Split(layers) => layers.iter_mut().for_each(|layer| of(&mut layer.name)),
                Qkv::Fused(layer, _) => of(&mut layer.name),
            }
            of(&mut attention.output.name);
            attention.sinks.iter_mut().for_each(of);
            let mlps = match &mut mlp.kind {
                MlpKind::Dense(mlp) => std::slice::from_mut(mlp),
                MlpKind::Experts(experts) => {
                    of(&mut experts.router.name);
                    experts.experts.as_mut_slice()
                }
            };
            mlps.iter_mut().flat_map(|mlp| mlp.up.iter_mut().chain([&mut mlp.down])).for_each(|l| of(&mut l.name));
        }
    }
}
